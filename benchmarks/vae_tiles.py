"""The difference of a VAE's tiled pictures to whole ones.

python -m benchmarks.vae_tiles --json FILE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES
from onediff_ext.core.shapes import parse_sizes
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.vae.vae_tiles import TILE_CELLS, choose_tiles, tiles_of

_ASSETS = Path(__file__).resolve().parents[1] / "onediff_ext" / "assets"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=_ASSETS / "demo" / "onediff-demo.safetensors")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--sizes", default="768x512, 712x1000")
    parser.add_argument("--photos", nargs="+", default=["raccoon", "dogs"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    checkpoint = load_checkpoint(arguments.model, dtype=DTYPES[arguments.dtype], device=device)
    rows = []
    for photo in arguments.photos:
        for size in parse_sizes(arguments.sizes):
            with Image.open(_ASSETS / "photos" / f"{photo}.jpg") as image:
                small = image.convert("RGB").resize((size.width_px, size.height_px))
            rows += measure(checkpoint.pipeline.vae, photo, small)
    figures = {
        "what": "pictures decoded in tiles against whole ones",
        "model": checkpoint.name,
        "dtype": arguments.dtype,
        "fingerprint": fingerprint(device),
        "rows": rows,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


@torch.no_grad()
def measure(vae: Any, photo: str, image: Image.Image) -> list[dict[str, object]]:
    """Encode a photograph; decode it whole and in tiles of each size smaller than it."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    picture = pixels.reshape(image.height, image.width, 3).permute(2, 0, 1)[None] / 127.5 - 1
    z = vae.encode(picture.to(vae.device, vae.dtype)).latent_dist.mode()
    whole = vae.decode(z).sample.float().clamp(-1, 1)
    rows = []
    for most in TILE_CELLS:
        if most >= max(z.shape[-2:]):
            continue
        tiles = choose_tiles(z.shape[-2], z.shape[-1], most)
        with tiles_of(vae, tiles):
            tiled = vae.decode(z).sample.float().clamp(-1, 1)
        difference = tiled - whole
        rows.append(
            {
                "photo": photo,
                "width": image.width,
                "height": image.height,
                "tile": 8 * tiles.side,
                "psnr_db": float(10 * torch.log10(4 / difference.square().mean())),
                "largest_of_255": float(127.5 * difference.abs().max()),
            }
        )
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
