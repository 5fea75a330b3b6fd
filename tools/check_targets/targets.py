"""What a compiled kernel takes of a GPU, and whether it fits.

Source of the limits: CUDA C++ Programming Guide 13.0, section "Compute Capabilities".
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onediff_ext.core.words import first_line

SHARED_BYTES = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}
"""Compute capability → largest shared memory of one program, in bytes."""

BF16_SINCE = 80
"""The oldest compute capability that computes in bfloat16."""


@dataclass(frozen=True)
class Target:
    """A variant, compiled for one generation.

    Args:
        kernel, label: Of the variant.
        capability: Compute capability times ten.
        shared_bytes, registers, spilled_bytes: What a program takes; registers are those of one
            thread.
        error: Why it does not compile or does not fit; empty otherwise.
    """

    kernel: str
    label: str
    capability: int
    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    error: str = ""


def compiled(
    kernel: str, label: str, capability: int, source: Any, options: Mapping[str, Any]
) -> Target:
    """Compile a kernel for one generation.

    Args:
        kernel, label: As `Target` has them.
        capability: Compute capability times ten, a key of `SHARED_BYTES`.
        source: Triton's ``ASTSource``.
        options: Of the launch, such as ``num_warps``.

    Returns:
        What it takes, or why it does not compile or does not fit.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile

    try:
        made = compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
        registers, spilled = _of_assembler(made.asm["ptx"], capability)
    except Exception as exc:
        error = f"{type(exc).__name__}: {first_line(str(exc))}"
        return Target(kernel, label, capability, error=error)
    shared: int = made.metadata.shared
    fits = shared <= SHARED_BYTES[capability]
    error = "" if fits else f"{shared:,} bytes of shared memory; {SHARED_BYTES[capability]:,} exist"
    return Target(kernel, label, capability, shared, registers, spilled, error)


def _of_assembler(ptx: str, capability: int) -> tuple[int, int]:
    """Return registers of a thread and spilled bytes, as ptxas counts them."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    arguments = get_ptxas.__code__.co_argcount
    ptxas = get_ptxas(capability) if arguments else get_ptxas()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        arch = f"--gpu-name={sm_arch_from_capability(capability)}"
        out = f"--output-file={Path(folder, 'kernel.cubin')}"
        command = [ptxas.path, "--verbose", arch, str(path), out]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stderr + done.stdout
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    if registers is None:
        raise ValueError(f"ptxas printed no registers: {said[:200]}")
    return int(registers[1]), max(map(int, spills), default=0)
