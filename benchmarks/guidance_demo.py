"""How guidance steps change the demo model's pictures, alone and with DeepCache.

    python -m benchmarks.guidance_demo --json FILE

Twelve concepts as in `tests/support/demo_pictures.py`, 20 steps of DPM++ 2M Karras at 128x128, CFG
scale 4, not compiled, in float32. CPU seconds are of the process, which draws all twelve in one
batch. PSNR is that to the pictures with guidance in all steps and without DeepCache. In the result
file, "similarity" is the cosine similarity of the predictions for prompt and negative prompt at
each step of these: the lowest of the twelve, the median and the highest.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch

from benchmarks.demo_concepts import DemoConcepts
from benchmarks.pictures import psnr_db
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.hosts.diffusers.deepcache import disable_deepcache, enable_deepcache
from onediff_ext.hosts.diffusers.guidance_steps import guidance_steps_for
from tests.support.demo_pictures import draw

GUIDANCE = (
    *("off", "interval:0-0.8", "interval:0-0.6", "interval:0-0.4", "adaptive:0.991"),
    *("gate:0.8", "gate:0.6", "gate:0.4"),
)
DEEPCACHE = ("off", "light", "medium")


def main() -> int:
    demo = DemoConcepts("guidance demo", __doc__.splitlines()[0])
    draw(demo.pipe, demo.prompts, steps=2)
    plain: Any = None
    rows = []
    for deepcache in DEEPCACHE:
        for setting in GUIDANCE:
            enable_deepcache(demo.pipe, deepcache)
            with guidance_steps_for(demo.pipe, GuidanceOptions.parse(setting)) as guided:
                pictures, row = demo.draw()
            disable_deepcache(demo.pipe)
            plain = pictures if plain is None else plain
            rows.append(
                {
                    "guidance_steps": setting,
                    "deepcache": deepcache,
                    "steps_with_guidance": guided.counts["guidance"] if guided else demo.steps,
                    **row,
                    **_distance(pictures, plain),
                }
            )
    demo.write(rows, similarity=_similarity(demo.pipe, demo.prompts, demo.steps))
    return 0


def _similarity(pipe: Any, prompts: list[str], steps: int) -> list[list[float]]:
    found: list[list[float]] = []

    def compare(_: Any, __: Any, output: Any) -> None:
        negative, prompt = output[0].flatten(1).chunk(2)
        each = torch.cosine_similarity(negative, prompt)
        found.append([round(float(x), 4) for x in (each.min(), each.median(), each.max())])

    hook = pipe.unet.register_forward_hook(compare)
    draw(pipe, prompts, steps=steps)
    hook.remove()
    return found


def _distance(pictures: torch.Tensor, plain: torch.Tensor) -> dict[str, float]:
    """How far pictures [B, 3, H, W] are from others; nothing for the same ones."""
    if torch.equal(pictures, plain):
        return {}
    levels = ((each * 255).round().double().numpy() for each in (pictures, plain))
    each = [psnr_db(one, other) for one, other in zip(*levels, strict=True)]
    return {
        "psnr_db_median": statistics.median(each),
        "psnr_db_min": min(each),
        "difference": float((pictures - plain).abs().mean()),
    }


if __name__ == "__main__":
    sys.exit(main())
