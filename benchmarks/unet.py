"""UNet steps of ours and of peers: ``python -m benchmarks.unet --model sdxl --json FILE``.

With ``--like-a1111`` all contenders run as in that host: under autocast, with weights in their
loaded order (NCHW). `forwards` says how it is measured.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.contenders import Contender, unet_contenders
from benchmarks.forwards import Subject, main, parser_of
from benchmarks.models import DTYPES, make_unet
from onediff_ext.core.shapes import BatchShape
from onediff_ext.hosts.diffusers.probe import unet_inputs

SIZES = (
    "512x512, 640x640, 720x720, 896x768, 960x720, 720x960, 768x1152, 832x1216, "
    "1024x1024, 1152x896, 1280x1280, 2048x512"
)


class UNets(Subject):
    """UNets of Stable Diffusion 1, 2 and XL, and two narrow ones for a CPU."""

    command = "benchmarks.unet"
    models = ("small", "tiny", "sd1", "sd2", "sdxl")
    sizes = SIZES
    peer_sizes = "1024x1024, 512x512, 960x720"
    cuda_dtype = "fp16"

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        self.what = "UNet step, CFG batch 2"
        if given.like_a1111:
            self.what += ", as in A1111: under autocast, weights in NCHW"

    def passed_on(self) -> list[str]:
        return ["--like-a1111"] if self.given.like_a1111 else []

    def contenders(self) -> list[Contender]:
        return unet_contenders(channels_last=not self.given.like_a1111)

    def make(self, device: torch.device, dtype: torch.dtype) -> Any:
        unet = make_unet(self.given.model, device, dtype)
        return unet if self.given.like_a1111 else unet.to(memory_format=torch.channels_last)

    def inputs(self, model: Any, size: BatchShape) -> dict[str, Any]:
        return unet_inputs(
            model, torch.Generator().manual_seed(1), batch=2 * size.batch,
            height_latent=size.height_px // 8, width_latent=size.width_px // 8,
        )  # fmt: skip

    def around(self) -> AbstractContextManager[Any]:
        device, dtype = torch.device(self.given.device), DTYPES[self.given.dtype]
        return torch.autocast(device.type, dtype, enabled=self.given.like_a1111)


def _arguments() -> argparse.Namespace:
    parser = parser_of(UNets, __doc__ or "")
    parser.add_argument("--like-a1111", action="store_true", help="autocast, weights in NCHW")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main(UNets, _arguments()))
