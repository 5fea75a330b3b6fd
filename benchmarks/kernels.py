"""Our Triton kernels beside Inductor's own code: ``python -m benchmarks.kernels --json FILE``.

Each is compared with float64 first; times are of CUDA-graph replays, so launches do not count.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.fingerprint import fingerprint

# (batch, channels, height, width) of SDXL at 512 and 1024 px, SD1.5, and the VAE's last level.
IMAGES = (
    (2, 320, 64, 64), (2, 320, 128, 128), (2, 640, 64, 64), (2, 1280, 16, 16), (2, 1280, 32, 32),
    (2, 960, 128, 128), (1, 512, 128, 128), (1, 128, 1024, 1024),
)  # fmt: skip
TOKENS = ((2, 256, 1280), (2, 1024, 1280), (2, 1024, 640), (2, 4096, 640), (2, 4096, 320))


def main() -> int:
    from triton.testing import do_bench_cudagraph

    from onediff_ext.backends.kernels import geglu, group_norm, layer_norm  # noqa: F401

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[arguments.dtype]
    device = torch.device("cuda")
    rows = []
    for name, shape, ours, plain, inputs in _cases(dtype, device):
        exact = plain(*(t.double() for t in inputs))
        compiled = torch.compile(plain, dynamic=True)
        times, errors = {}, {}
        for who, function in (("ours", ours), ("inductor", compiled), ("eager", plain)):
            errors[who] = float((function(*inputs).double() - exact).norm() / exact.norm())
            times[who] = 1e3 * do_bench_cudagraph(lambda: function(*inputs))  # noqa: B023
        figures = "  ".join(f"{who} {times[who]:7.1f} us {errors[who]:.1e}" for who in times)
        print(f"{name:20} {shape!s:24} {figures}", flush=True)
        rows.append({"kernel": name, "shape": shape, "us": times, "error_vs_float64": errors})
    figures = {
        "what": "kernels",
        "dtype": arguments.dtype,
        "fingerprint": fingerprint(device),
        "rows": rows,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


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
