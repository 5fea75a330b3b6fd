"""Image to image with plain diffusers, the peer of `benchmarks.pipeline`.

A separate process that imports nothing of ours, unless ``--compile`` adds the one call of
`compile_pipe` that a user would add. It loads the weights, converts them to channels
last, and runs each batch through diffusers' own pipeline. Outputs have the names of their inputs.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from diffusers import AutoPipelineForImage2Image, EulerAncestralDiscreteScheduler
from PIL import Image


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inputs", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--negative-prompt", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--strength", type=float, required=True)
    parser.add_argument("--guidance", type=float, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--compile", action="store_true", help="with compile_pipe")
    arguments = parser.parse_args()

    pipe = AutoPipelineForImage2Image.from_pretrained(
        str(arguments.model),
        torch_dtype=getattr(torch, arguments.dtype),
        use_safetensors=True,
        local_files_only=True,
    ).to(arguments.device)
    # The step spacing of the WebUI's "Euler a", which ours uses too.
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(
        pipe.scheduler.config, timestep_spacing="linspace"
    )
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)
    pipe.set_progress_bar_config(disable=True)
    if arguments.compile:
        from onediff_ext import compile_pipe

        pipe = compile_pipe(pipe)

    paths = sorted(arguments.inputs.iterdir())
    for _, of_size in itertools.groupby(paths, key=lambda path: path.stem.rsplit("-", 1)[0]):
        group = list(of_size)
        for first in range(0, len(group), arguments.batch_size):
            batch = group[first : first + arguments.batch_size]
            images = pipe(
                prompt=[arguments.prompt] * len(batch),
                negative_prompt=[arguments.negative_prompt] * len(batch),
                image=[Image.open(path).convert("RGB") for path in batch],
                num_inference_steps=arguments.steps,
                strength=arguments.strength,
                guidance_scale=arguments.guidance,
                # On the CPU, as in ours: a seed gives the same picture in every batch.
                generator=[torch.Generator().manual_seed(arguments.seed) for _ in batch],
            ).images
            for path, image in zip(batch, images, strict=True):
                # The same compression as ours; Pillow's default takes twice the time.
                image.save(arguments.output / f"{path.stem}.png", compress_level=4)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
