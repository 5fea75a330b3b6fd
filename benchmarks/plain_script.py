# python plain_script.py MODEL STEPS SIZE…, such as: stable-diffusion-xl 20 720x960 1024x1024
import sys

import torch
from diffusers import DiffusionPipeline

from onediff_ext import compile_pipe

model, steps, *sizes = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=dtype).to(device)

pipe = compile_pipe(pipe)  # any diffusers pipeline; nothing else changes

for number, size in enumerate(sizes):
    width, height = (int(side) for side in size.split("x"))
    image = pipe(
        "a fox in the snow",
        width=width,
        height=height,
        num_inference_steps=int(steps),
        generator=torch.Generator().manual_seed(number),
    ).images[0]
    image.save(f"{number:03}-{size}.png")
