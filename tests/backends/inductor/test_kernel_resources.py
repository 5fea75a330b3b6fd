"""Kernels fit into every GPU: compiled here, without one, wherever Triton is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton, which comes with torch for GPUs, is not installed")

# Compute capability → most bytes of shared memory that a program may have.
SHARED_BYTES = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
FP8_SINCE = 89


def _shared_bytes(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    types: dict[str, str] | None = None,
    **launch: int,
) -> int:
    """Compile it; pointers are to 16 bits unless `types` says otherwise."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {
        name: "constexpr" if name in constants else "*fp16" if name.endswith("_ptr") else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, {**signature, **(types or {})}, constants)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
    shared: int = made.metadata.shared
    return shared


@pytest.mark.parametrize("capability", [c for c in SHARED_BYTES if c >= 80])
@pytest.mark.parametrize("width", [40, 64, 80, 160])
def test_cross_attention(width: int, capability: int) -> None:
    from onediff_ext.backends.inductor.kernels.cross_attention import cross_attention_kernel, launch

    chosen = launch(width)
    options = {name: chosen.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"FACTOR": 0.1, **chosen}
    shared = _shared_bytes(cross_attention_kernel, capability, constants, **options)
    assert shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("into", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("channels", [96, 1280, 8192])
def test_rows(channels: int, into: torch.dtype | None, capability: int) -> None:
    from onediff_ext.backends.inductor.kernels.geglu import geglu_rows_kernel
    from onediff_ext.backends.inductor.kernels.int8_rows import LIMITS, row_parts, rows_kernel
    from onediff_ext.backends.inductor.kernels.layer_norm import layer_norm_kernel

    if into is torch.float8_e4m3fn and capability < FP8_SINCE:
        pytest.skip("has no fp8")
    parts = row_parts(channels)
    warps = parts.pop("num_warps")
    constants: dict[str, Any] = {**parts, "LIMIT": LIMITS[into] if into else 0.0}
    eight = "*i8" if into is torch.int8 else "*fp8e4nv"
    types = {"q_ptr": eight, "out_ptr": eight, "scale_ptr": "*fp32"} if into else {}
    used = [
        _shared_bytes(
            layer_norm_kernel, capability, {**constants, "ADD": True},
            {"eps": "fp32", **{k: v for k, v in types.items() if k != "q_ptr"}}, num_warps=warps,
        )
    ]  # fmt: skip
    if into:
        types.pop("out_ptr")
        used += [
            _shared_bytes(kernel, capability, constants, types, num_warps=warps)
            for kernel in (geglu_rows_kernel, rows_kernel)
        ]
    assert max(used) <= SHARED_BYTES[capability]
    if warps == 1:
        assert max(used) == 0  # nobody waits for anybody


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("out", "rounded"), [("*fp16", True), ("*fp16", False), ("*fp32", True)])
def test_group_norm(out: str, rounded: bool, capability: int) -> None:
    from onediff_ext.backends.inductor.kernels import group_norm

    floats = ("count_ptr", "mean_ptr", "m2_ptr", "scale_ptr", "shift_ptr")
    types = {**dict.fromkeys(floats, "*fp32"), "out_ptr": out, "eps": "fp64"}
    blocks = {"ROWS": 64, "CHANNELS_BLOCK": 64}
    groups = {"CHUNKS": 256, "ROWS": 64, "CHUNKS_BLOCK": 32, "GROUP_BLOCK": 64, "ADD": True}
    used = [
        _shared_bytes(
            kernel, capability, constants,
            {name: kind for name, kind in types.items() if name in kernel.arg_names}, num_warps=4,
        )
        for kernel, constants in (
            (group_norm.moments_kernel, {"CHUNKS": 256, **blocks}),
            (group_norm.scale_kernel, groups),
            (group_norm.apply_kernel, {"SILU": True, "ROUNDED": rounded, **blocks}),
        )
    ]  # fmt: skip
    assert max(used) <= SHARED_BYTES[capability]
