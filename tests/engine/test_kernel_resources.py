"""Kernels fit into every GPU: compiled here, without one, wherever Triton is installed."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton, which comes with torch for GPUs, is not installed")

# Compute capability → most bytes of shared memory that a program may have.
SHARED_BYTES = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("width", [40, 64, 80, 160])
def test_cross_attention(width: int, capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from onediff_ext.backends.kernels.cross_attention import LAUNCH, blocks, cross_attention_kernel

    if capability < 80 and width > 64:
        pytest.skip("attention of heads so wide stays as it is there")
    constants = {"FACTOR": 0.1, **blocks(width)}
    signature = {
        name: "constexpr" if name in constants else "*fp16" if name.endswith("_ptr") else "i32"
        for name in cross_attention_kernel.arg_names
    }
    source = ASTSource(cross_attention_kernel, signature, constants)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=LAUNCH)
    assert made.metadata.shared <= SHARED_BYTES[capability]
