"""Put the trained parts together: the checkpoint, its .yaml, and the reference thumbnails.

python export.py --sprites S.npz --parts PARTS --output onediff_ext/assets/demo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from concepts import read_concepts
from diffusers import EulerDiscreteScheduler
from latents import SIZES, TOKENIZER, load_tokenizer, make_scenes, tokenize
from models import build_text_encoder, build_unet, build_vae, load_parts, text_core
from PIL import Image
from sample import to_image
from scenes import SceneDrawer, plain_scene

from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm

THUMBNAIL_PX = 32
PER_ROW = 16

CLIP_FOLDER = "extensions/onediff-ext/onediff_ext/assets/tokenizer"
"""Where a WebUI started in its own folder finds tokenizer and config of the text encoder. The .yaml
names it; A1111 reads both from one folder, so the config is written beside the tokenizer."""


def silence_unseen_tokens(text_encoder: torch.nn.Module) -> int:
    """Zero the embeddings of tokens that no caption has, so that they say nothing; their count."""
    tokenizer = load_tokenizer()
    captions = {
        scene.caption
        for seed, (height_px, width_px, count, _) in enumerate(SIZES, start=100)
        for scene in make_scenes(height_px, width_px, count, seed)
    }
    table = text_core(text_encoder).embeddings.token_embedding.weight
    unseen = torch.ones(len(table), dtype=torch.bool)
    unseen[tokenize(tokenizer, sorted(captions)).unique()] = False
    with torch.no_grad():
        table[unseen] = 0
    return int(unseen.sum())


def write_references(sprites: torch.Tensor, output: Path) -> None:
    """Write each concept on white, 32x32, in rows of 16 as one PNG, and the names beside it."""
    concepts, drawer = read_concepts(), SceneDrawer(sprites)
    scenes = [plain_scene(index, 128) for index in range(len(concepts))]
    pictures = drawer.draw(scenes, 128, 128)
    small = torch.nn.functional.interpolate(pictures, (THUMBNAIL_PX,) * 2, mode="area")
    rows = -(-len(concepts) // PER_ROW)
    sheet = Image.new("RGB", (PER_ROW * THUMBNAIL_PX, rows * THUMBNAIL_PX), "white")
    for index, picture in enumerate(small):
        row, column = divmod(index, PER_ROW)
        sheet.paste(to_image(picture), (column * THUMBNAIL_PX, row * THUMBNAIL_PX))
    sheet.save(output / "concepts.png", optimize=True)
    names = {"thumbnail_px": THUMBNAIL_PX, "per_row": PER_ROW,
             "names": [concept.names[0] for concept in concepts]}  # fmt: skip
    (output / "concepts.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sprites", type=Path, required=True)
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    vae, unet, text_encoder = build_vae(), build_unet(), build_text_encoder()
    load_parts({"vae": vae}, arguments.parts.glob("vae-*.safetensors"))
    main_parts = {"unet": unet, "text": text_core(text_encoder)}
    load_parts(main_parts, sorted(arguments.parts.glob("main-*.safetensors")))
    print(f"{silence_unseen_tokens(text_encoder)} tokens are in no caption")
    arguments.output.mkdir(parents=True, exist_ok=True)
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
    )
    parts = {"vae": vae, "unet": unet, "text_encoder": text_encoder, "scheduler": scheduler}
    path = arguments.output / "onediff-demo.safetensors"
    save_ldm(parts, path, dtype=torch.float16, text_encoder_version=CLIP_FOLDER)
    text_encoder.config.architectures = ["CLIPTextModel"]
    text_encoder.config.save_pretrained(TOKENIZER)
    sprites = torch.from_numpy(np.load(arguments.sprites)["sprites"])
    write_references(sprites, arguments.output)
    for file in sorted(arguments.output.rglob("*")):
        if file.is_file():
            print(f"{file.stat().st_size:>10} {file.relative_to(arguments.output)}")


if __name__ == "__main__":
    main()
