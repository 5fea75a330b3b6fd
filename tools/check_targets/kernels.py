"""Our own Triton kernels: each variant that the shipped architectures use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.check_targets.targets import BF16_SINCE, Target, compiled

FP8_SINCE = 89
ATTENTION_SINCE = 80  # below, `rewrite_attention` leaves attention as it is

HEAD_WIDTHS = (40, 64, 80, 160)
CHANNELS = (96, 320, 640, 1280, 8192)
ACTIVATED = ((96, 0), (10240, 0), (12288, 3072), (16384, 0))
"""Channels with an activation, and channels before them."""
_16_BITS = {"fp16": 0, "bf16": BF16_SINCE}
_8_BITS = {"int8": ("i8", 0), "fp8": ("fp8e4nv", FP8_SINCE)}


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time arguments.

    Args:
        kernel: Name of the kernel.
        label: What distinguishes it from the kernel's other variants.
        since: The oldest compute capability that uses it.
        constants: Its compile-time arguments.
        types: Types of the other arguments. Pointers are to `dtype` and numbers i32 unless named.
        dtype: "fp16" or "bf16".
        num_warps: Warps of a program.
        num_stages: Depth of its pipelined loads.
    """

    kernel: str
    label: str
    since: int
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    dtype: str = "fp16"
    num_warps: int = 4
    num_stages: int = 3


def variants() -> Iterator[Variant]:
    """Yield what the shipped architectures and some extremes need."""
    for dtype, since in _16_BITS.items():
        yield from _attention(dtype, since)
        yield from _rows(dtype, since)
        yield from _activated_rows(dtype, since)
        yield from _group_norms(dtype, since)
        yield from _rotary_norms(dtype, since)


def _attention(dtype: str, since: int) -> Iterator[Variant]:
    from onediff_ext.backends.inductor.kernels.cross_attention import launch

    for width in HEAD_WIDTHS:
        chosen = launch(width)
        warps, stages = (chosen.pop(name) for name in ("num_warps", "num_stages"))
        yield Variant(
            "cross_attention_kernel",
            f"heads of {width}, {dtype}",
            max(since, ATTENTION_SINCE),
            {"FACTOR": 0.1, **chosen},
            dtype=dtype,
            num_warps=warps,
            num_stages=stages,
        )


def _rows(dtype: str, since: int) -> Iterator[Variant]:
    """Kernels that hold one row of channels."""
    from onediff_ext.backends.inductor.kernels.int8_rows import LIMITS, row_parts

    limits = {"int8": 0.0, "fp8": 0.0}
    for limited, limit in LIMITS.items():
        limits["int8" if "int8" in str(limited) else "fp8"] = limit
    eps = {"eps": "fp32"}
    for channels in CHANNELS:
        parts = row_parts(channels)
        warps = parts.pop("num_warps")
        yield Variant(
            "layer_norm_kernel",
            f"{channels} channels, {dtype}",
            since,
            {**parts, "LIMIT": 0.0, "ADD": True},
            eps,
            dtype,
            warps,
        )
        for name, (pointed, needed) in _8_BITS.items():
            label = f"{channels} channels, {dtype} to {name}"
            constants = {**parts, "LIMIT": limits[name]}
            eight, since_both = f"*{pointed}", max(since, needed)
            scaled = {"scale_ptr": "*fp32"}
            yield Variant(
                "layer_norm_kernel",
                label,
                since_both,
                {**constants, "ADD": True},
                {**eps, **scaled, "out_ptr": eight},
                dtype,
                warps,
            )
            for kernel in ("geglu_rows_kernel", "rows_kernel"):
                yield Variant(
                    kernel, label, since_both, constants, {**scaled, "q_ptr": eight}, dtype, warps
                )


def _activated_rows(dtype: str, since: int) -> Iterator[Variant]:
    from onediff_ext.backends.inductor.kernels.activated_rows import GELU, SILU, parts_of
    from onediff_ext.backends.inductor.kernels.int8_rows import LIMITS

    limits = {"int8": LIMITS[torch.int8], "fp8": LIMITS[torch.float8_e4m3fn]}
    for (channels, before), (name, (pointed, needed)) in itertools.product(
        ACTIVATED, _8_BITS.items()
    ):
        for activation, gated in ((GELU, False), (SILU, True)):
            parts = parts_of(channels, before)
            warps = parts.pop("num_warps")
            joined = f" after {before}" if before else ""
            yield Variant(
                "activated_rows_kernel",
                f"{channels} channels{joined}{', gated' if gated else ''}, {dtype} to {name}",
                max(since, needed),
                {**parts, **activation, "GATED": gated, "LIMIT": limits[name]},
                {"scale_ptr": "*fp32", "q_ptr": f"*{pointed}"},
                dtype,
                warps,
            )


def _group_norms(dtype: str, since: int) -> Iterator[Variant]:
    floats = dict.fromkeys(("count_ptr", "mean_ptr", "m2_ptr", "scale_ptr", "shift_ptr"), "*fp32")
    floats["eps"] = "fp64"
    blocks = {"ROWS": 64, "CHANNELS_BLOCK": 64}
    groups = {"CHUNKS": 256, "ROWS": 64, "CHUNKS_BLOCK": 32, "GROUP_BLOCK": 64, "ADD": True}
    yield Variant("moments_kernel", dtype, since, {"CHUNKS": 256, **blocks}, floats, dtype)
    yield Variant("scale_kernel", dtype, since, groups, floats, dtype)
    for out, rounded in ((dtype, True), (dtype, False), ("fp32", True)):
        label = f"{dtype} to {out}{', rounded' if rounded else ''}"
        constants = {"SILU": True, "ROUNDED": rounded, **blocks}
        yield Variant(
            "apply_kernel", label, since, constants, {**floats, "out_ptr": f"*{out}"}, dtype
        )


def _rotary_norms(dtype: str, since: int) -> Iterator[Variant]:
    floats = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "eps": "fp32"}
    for heads, channels in ((32, 128), (32, 64), (64, 128)):
        for joined in (False, True):
            label = f"{heads} heads of {channels}, {'joined, ' if joined else ''}{dtype}"
            constants = {"JOINED": joined, "HEADS": heads, "CHANNELS": channels}
            yield Variant("rotary_norm_kernel", label, since, constants, floats, dtype)


def compiled_variant(variant: Variant, capability: int) -> Target:
    """Compile a variant for one generation.

    Args:
        variant: Of `variants`.
        capability: Compute capability times ten, a key of `SHARED_BYTES`.
    """
    from triton.compiler import ASTSource

    kernel = _kernel(variant.kernel)
    signature = {
        name: "constexpr"
        if name in variant.constants
        else variant.types.get(name, f"*{variant.dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, variant.constants)
    launched = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return compiled(variant.kernel, variant.label, capability, source, launched)


def _kernel(name: str) -> Any:
    from onediff_ext.backends.inductor.kernels import (
        activated_rows,
        cross_attention,
        geglu,
        group_norm,
        int8_rows,
        layer_norm,
        rotary_norm,
    )

    rooms = (
        activated_rows, cross_attention, geglu, group_norm, int8_rows, layer_norm, rotary_norm
    )  # fmt: skip
    return next(getattr(room, name) for room in rooms if hasattr(room, name))
