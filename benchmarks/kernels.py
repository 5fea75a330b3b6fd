"""Our Triton kernels beside Inductor's own code: ``python -m benchmarks.kernels --json FILE``.

Each is compared with float64 first; times are of CUDA-graph replays, so launches do not count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES
from benchmarks.results import check_mergeable, merge, now, read_result, write_result
from benchmarks.timing import median_and_p95

KEY = ("contender", "kernel", "shape", "dtype")

# (batch, channels, height, width) of SDXL at 512 and 1024 px, SD1.5, and the VAE's last level.
IMAGES = (
    (2, 320, 64, 64), (2, 320, 128, 128), (2, 640, 64, 64), (2, 1280, 16, 16), (2, 1280, 32, 32),
    (2, 960, 128, 128), (1, 512, 128, 128), (1, 128, 1024, 1024),
)  # fmt: skip
TOKENS = ((2, 256, 1280), (2, 1024, 1280), (2, 1024, 640), (2, 4096, 640), (2, 4096, 320))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp16")
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
    figures = {**head, "rows": _rows(dtype, device)}
    if arguments.json is not None:
        write_result(arguments.json, merge(old, figures, key=KEY))
    return 0


def _rows(dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """A row for each contender, kernel and shape."""
    from triton.testing import do_bench_cudagraph

    from onediff_ext.backends.kernels import geglu, group_norm, layer_norm  # noqa: F401

    rows = []
    for name, shape, ours, plain, inputs in _cases(dtype, device):
        exact = plain(*(t.double() for t in inputs))
        compiled = torch.compile(plain, dynamic=True)
        shown = []
        for who, function in (("ours-triton", ours), ("inductor", compiled), ("eager", plain)):
            error = float((function(*inputs).double() - exact).norm() / exact.norm())
            times = do_bench_cudagraph(lambda: function(*inputs), return_mode="all")  # noqa: B023
            median, p95 = median_and_p95([1e3 * ms for ms in times])
            rows.append({
                "contender": who, "kernel": name, "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."), "us_median": median, "us_p95": p95,
                "error_vs_float64": error, "measured": now(),
            })  # fmt: skip
            shown.append(f"{who} {median:7.1f} us {error:.1e}")
        print(f"{name:20} {shape!s:24} {'  '.join(shown)}", flush=True)
    return rows


def _cases(dtype: torch.dtype, device: torch.device) -> Any:
    ops = torch.ops.onediff
    noise = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise, device=device).to(dtype)

    def our_group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.group_norm(x, 32, w, b, 1e-5, True)

    def our_layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, w, b, 1e-5)

    def our_add_layer_norm(
        x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        return ops.add_layer_norm(x, y, w, b, 1e-5)[1]

    def group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.silu(functional.group_norm(x, 32, w, b, 1e-5))

    def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], w, b, 1e-5)

    def add_layer_norm(
        x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        return functional.layer_norm(x + y, x.shape[-1:], w, b, 1e-5)

    def plain_geglu(x: torch.Tensor) -> torch.Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * functional.gelu(gate)

    for shape in IMAGES:
        x = (random(*shape) + 1).contiguous(memory_format=torch.channels_last)
        inputs = (x, random(shape[1]), random(shape[1]))
        yield "group_norm_silu", shape, our_group_norm, group_norm, inputs
    for shape in TOKENS:
        w, b = random(shape[-1]), random(shape[-1])
        x = random(*shape)
        yield "layer_norm", shape, our_layer_norm, layer_norm, (x, w, b)
        inputs = (x, random(*shape), w, b)
        yield "add_layer_norm", shape, our_add_layer_norm, add_layer_norm, inputs
        wide = random(*shape[:2], 8 * shape[2])
        yield "geglu", tuple(wide.shape), ops.geglu, plain_geglu, (wide,)


if __name__ == "__main__":
    raise SystemExit(main())
