"""Our kernels, and FlashAttention's, against Inductor's own code: ``python -m benchmarks.kernels``.

Each kernel is compared with float64 first. Times are of CUDA graph replays, without launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from benchmarks.timing import median_and_p95
from onediff_ext.backends.inductor import flash_attention, flash_compiler

KEY = ("contender", "kernel", "shape", "dtype")

# (batch, channels, height, width) of SDXL at 512 and 1024 px, SD1.5, and the VAE's last level.
IMAGES = (
    (2, 320, 64, 64), (2, 320, 128, 128), (2, 640, 64, 64), (2, 1280, 16, 16), (2, 1280, 32, 32),
    (2, 960, 128, 128), (1, 512, 128, 128), (1, 128, 1024, 1024),
)  # fmt: skip
PROMPT_TOKENS = 77
# (batch, tokens, heads, channels of a head) of Flux.1 at 512 and 1024 px, text tokens apart.
ROTATED, TEXT_TOKENS = ((1, 1024, 24, 128), (1, 4096, 24, 128)), 512
# (batch, tokens, channels before, channels) of feed-forward networks of Flux.1 at 512 and 1024 px,
# of single and double blocks, and of SD3.5-medium; then of Z-Image.
ACTIVATED = (
    (1, 1536, 3072, 12288), (1, 4608, 3072, 12288), (1, 1024, 0, 12288), (1, 4096, 0, 12288),
    (2, 4096, 0, 6144),
)  # fmt: skip
GATED = ((1, 4160, 0, 10240),)
# (batch, tokens, heads, channels of a head) of self-attention: SDXL and SD1.5 at 512 and 1024 px;
# then SD3.5-large and -medium, Flux.1 and Z-Image at 512, 960x720 and 1024 px, text included.
ATTENTION = {
    torch.float16: (
        (2, 1024, 10, 64), (2, 256, 20, 64), (2, 4096, 10, 64), (2, 1024, 20, 64),
        (2, 4096, 8, 40), (2, 1024, 8, 80), (2, 256, 8, 160),
        (2, 16384, 8, 40), (2, 4096, 8, 80), (2, 1024, 8, 160),
    ),
    torch.bfloat16: (
        (2, 1357, 38, 64), (2, 3033, 38, 64), (2, 4429, 38, 64),
        (2, 1357, 24, 64), (2, 3033, 24, 64), (2, 4429, 24, 64),
        (1, 1536, 24, 128), (1, 3212, 24, 128), (1, 4608, 24, 128),
        (1, 1152, 30, 128), (1, 2828, 30, 128), (1, 4224, 30, 128),
    ),
}  # fmt: skip
TOKENS = ((2, 256, 1280), (2, 1024, 1280), (2, 1024, 640), (2, 4096, 640), (2, 4096, 320))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp16")
    parser.add_argument("--kernels", default="", help="only those whose names have this in them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--replace", action="store_true", help="forget what is in the JSON file")
    arguments = parser.parse_args()
    device, dtype = torch.device("cuda"), DTYPES[arguments.dtype]
    head = {
        "what": "kernels, microseconds of a replay",
        "model": None,
        "fingerprint": fingerprint(device),
    }
    keep = arguments.json is not None and not arguments.replace
    old = read_result(arguments.json) if keep else None
    check_mergeable(old, head)
    figures = {**head, "rows": _rows(dtype, device, arguments.kernels)}
    if arguments.json is not None:
        write_result(arguments.json, merge(old, figures, key=KEY))
    return 0


@dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Args:
        kernel: Its name.
        shape: Of its main input.
        ours, plain: The kernel, and the same operation in torch, for Inductor and eager.
        inputs: Arguments of both.
        exact: Computes the expected output from inputs in float64; None means `plain`.
        value: Converts an output to float64.
        contender: Whose kernel it is.
    """

    kernel: str
    shape: Sequence[int]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    exact: Callable[..., torch.Tensor] | None = None
    value: Callable[[Any], torch.Tensor] = torch.Tensor.double
    contender: str = "ours-triton"


def _rows(dtype: torch.dtype, device: torch.device, named: str) -> list[dict[str, Any]]:
    """Return a row for each contender, kernel and shape."""
    from triton.testing import do_bench_cudagraph

    from onediff_ext.backends.inductor.kernels import register_kernels

    register_kernels()
    rows = []
    cases = (_cases, _rotary_cases, _activated_cases, _attention_cases)
    for case in chain.from_iterable(of(dtype, device) for of in cases):
        if named not in case.kernel:
            continue
        exact = (case.exact or case.plain)(*(t.double() for t in case.inputs))
        compiled = torch.compile(case.plain, dynamic=True)
        shown = []
        for who, function in (
            (case.contender, case.ours), ("inductor", compiled), ("eager", case.plain)
        ):  # fmt: skip
            found = case.value(function(*case.inputs))
            error = float((found - exact).norm() / exact.norm())
            times = do_bench_cudagraph(
                lambda: function(*case.inputs),  # noqa: B023
                return_mode="all",
            )
            median, p95 = median_and_p95([1e3 * ms for ms in times])
            rows.append({
                "contender": who, "kernel": case.kernel, "shape": list(case.shape),
                "dtype": str(dtype).removeprefix("torch."), "us_median": median, "us_p95": p95,
                "error_vs_float64": error, "measured": now(),
            })  # fmt: skip
            shown.append(f"{who} {median:7.1f} us {error:.1e}")
        print(f"{case.kernel:20} {tuple(case.shape)!s:24} {'  '.join(shown)}", flush=True)
    return rows


def _cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    from onediff_ext.engine.quantization import unavailable_reason
    from onediff_ext.engine.quantized_linears import quantize_rows

    ops = torch.ops.onediff
    noise = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise, device=device).to(dtype)

    def group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.silu(functional.group_norm(x, 32, w, b, 1e-5))

    def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], w, b, 1e-5)

    def add_layer_norm(
        x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        return functional.layer_norm(x + y, x.shape[-1:], w, b, 1e-5)

    def geglu(x: torch.Tensor) -> torch.Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * functional.gelu(gate)

    def in_fp8(x: torch.Tensor, bound: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return quantize_rows(x.reshape(-1, x.shape[-1]), "fp8", bound)

    def add_layer_norm_in_fp8(
        x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        bound = (w.float().abs() * w.shape[0] ** 0.5 + b.float().abs()).amax(0, keepdim=True)
        total = x + y
        return (total, *in_fp8(layer_norm(total, w, b), bound))

    def number(found: Any) -> torch.Tensor:
        """Return the value of 8-bit numbers and scales, which are the last two outputs."""
        value: torch.Tensor = found[-2].double() * found[-1].double()
        return value

    shape: Sequence[int]
    for shape in IMAGES:
        x = (random(*shape) + 1).contiguous(memory_format=torch.channels_last)
        yield Case(
            "group_norm_silu", shape,
            lambda x, w, b: ops.group_norm(x, 32, w, b, 1e-5, True), group_norm,
            (x, random(shape[1]), random(shape[1])),
        )  # fmt: skip
    fp8 = unavailable_reason("fp8", device) is None
    for shape in TOKENS:
        w, b, x = random(shape[-1]), random(shape[-1]), random(*shape)
        both, wide = (x, random(*shape), w, b), random(*shape[:2], 8 * shape[2])
        yield Case(
            "layer_norm", shape,
            lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), layer_norm, (x, w, b),
        )  # fmt: skip
        yield Case(
            "add_layer_norm", shape,
            lambda x, y, w, b: ops.add_layer_norm(x, y, w, b, 1e-5)[1], add_layer_norm, both,
        )  # fmt: skip
        yield Case("geglu", wide.shape, ops.geglu, geglu, (wide,))
        if fp8:
            rows = (-1, shape[-1])
            yield Case(
                "add_layer_norm_fp8", shape,
                lambda x, y, w, b: ops.add_layer_norm_in_8_bits(
                    x, y, w, b, 1e-5, torch.float8_e4m3fn
                ),
                add_layer_norm_in_fp8, both,
                lambda *a, rows=rows: add_layer_norm(*a).reshape(rows), number,
            )  # fmt: skip
            yield Case(
                "geglu_fp8", wide.shape,
                lambda x: ops.geglu_in_8_bits(x, torch.float8_e4m3fn),
                lambda x: in_fp8(geglu(x)), (wide,),
                lambda x, rows=rows: geglu(x).reshape(-1, 4 * rows[1]), number,
            )  # fmt: skip
        head = 40 if shape[2] == 320 else 64
        q, k, v = (
            random(shape[0], tokens, shape[2] // head, head).transpose(1, 2)
            for tokens in (shape[1], PROMPT_TOKENS, PROMPT_TOKENS)
        )
        yield Case(
            "cross_attention", q.shape,
            lambda q, k, v: ops.cross_attention(q, k, v, q.shape[-1] ** -0.5),
            functional.scaled_dot_product_attention, (q, k, v),
        )  # fmt: skip


def _rotary_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Queries of Flux: of a single block, and joined ones of a double block."""
    ops = torch.ops.onediff
    noise = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise, device=device)

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, w.shape, w, 1e-6)

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([-imaginary, real], dim=-1).flatten(3)
        return (x.to(cos.dtype) * cos + rotated.to(sin.dtype) * sin).to(x.dtype)

    for batch, tokens, heads, channels in ROTATED:
        both = TEXT_TOKENS + tokens
        text, image = (random(batch, n, heads, channels).to(dtype) for n in (TEXT_TOKENS, tokens))
        weights = [random(channels).to(dtype) for _ in range(2)]
        tables = random(2, 1, both, 1, channels).unbind()
        shape = (batch, both, heads, channels)
        yield Case(
            "rotary_norm", shape,
            lambda x, w, cos, sin: ops.rotary_norm(x, w, 1e-6, cos, sin),
            lambda x, w, cos, sin: turned(norm(x, w), cos, sin),
            (torch.cat([text, image], dim=1), weights[1], *tables),
        )  # fmt: skip
        yield Case(
            "joined_rotary_norm", shape,
            lambda s, x, v, w, cos, sin: ops.joined_rotary_norm(s, x, v, w, 1e-6, cos, sin),
            lambda s, x, v, w, cos, sin: turned(
                torch.cat([norm(s, v), norm(x, w)], dim=1), cos, sin
            ),
            (text, image, *weights, *tables),
        )  # fmt: skip


def _activated_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """What the second layer of a feed-forward network reads, in fp8."""
    from onediff_ext.engine.quantization import unavailable_reason
    from onediff_ext.engine.quantized_linears import quantize_rows

    if unavailable_reason("fp8", device) is not None:
        return
    ops, fp8 = torch.ops.onediff, torch.float8_e4m3fn
    noise = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise, device=device).to(dtype)

    def number(found: Any) -> torch.Tensor:
        value: torch.Tensor = found[0].double() * found[1].double()
        return value

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, x.shape[-1])

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return rows(functional.gelu(x, approximate="tanh"))

    def joined(x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return rows(torch.cat([before, functional.gelu(x, approximate="tanh")], dim=2))

    def swiglu(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rows(functional.silu(x) * gate)

    for batch, tokens, before, channels in ACTIVATED:
        shape = (batch, tokens, before, channels)
        wide = random(batch, tokens, 3 * before + channels)[..., 3 * before :]
        if before:
            yield Case(
                "joined_gelu_fp8", shape,
                lambda x, y: ops.gelu_in_8_bits(x, y, fp8),
                lambda x, y: quantize_rows(joined(x, y), "fp8"),
                (wide, random(batch, tokens, before)), joined, number,
            )  # fmt: skip
        else:
            yield Case(
                "gelu_fp8", shape,
                lambda x: ops.gelu_in_8_bits(x, None, fp8),
                lambda x: quantize_rows(gelu(x), "fp8"), (wide,), gelu, number,
            )  # fmt: skip
    for batch, tokens, before, channels in GATED:
        yield Case(
            "swiglu_fp8", (batch, tokens, before, channels),
            lambda x, y: ops.swiglu_in_8_bits(x, y, None, fp8),
            lambda x, y: quantize_rows(swiglu(x, y), "fp8"),
            random(batch, tokens, 2 * channels).chunk(2, dim=-1), swiglu, number,
        )  # fmt: skip


def _attention_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Self-attention by FlashAttention 4, where it is installed, beside PyTorch's choice."""
    if flash_attention.version(device) is None:
        return
    noise = torch.Generator(device).manual_seed(0)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = zip(*(tensor.flatten(0, 1) for tensor in (q, k, v)), strict=True)
        mixed = [((q @ k.T) * q.shape[-1] ** -0.5).softmax(-1) @ v for q, k, v in heads]
        return torch.stack(mixed).view_as(q)

    for shape in ATTENTION.get(dtype, ()):
        kernel = flash_attention.Kernel(dtype, shape[-1])
        stored = flash_compiler.compiled(kernel, device)
        if stored is None:
            continue
        flash_attention.use_stored({kernel: stored})
        q, k, v = (
            torch.randn(shape, generator=noise, device=device).to(dtype).transpose(1, 2)
            for _ in range(3)
        )
        yield Case(
            "self_attention", shape,
            lambda q, k, v: torch.ops.onediff.flash_attention(q, k, v, q.shape[-1] ** -0.5),
            functional.scaled_dot_product_attention, (q, k, v), exact,
            contender="flash-attn-4",
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
