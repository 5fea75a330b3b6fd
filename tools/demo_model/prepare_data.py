"""Render the training pictures: Noto Emoji's drawings of the concepts in concepts.tsv.

Reads the sprite sheet of the npm package @svgmoji/noto and writes one .npz with `sprites`
[N, 256, 256, 4] (uint8, straight alpha) in the order of concepts.tsv.

    npm pack @svgmoji/noto@3.2.0 && tar xzf svgmoji-noto-3.2.0.tgz
    python -m tools.demo_model.prepare_data package/sprites/all.svg .scratch/sprites.npz
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

import numpy as np
from PIL import Image

from tools.demo_model.concepts import read_concepts

SIDE_PX = 256
"""The side of a rendered sprite."""

XMLNS = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


def split_sheet(sheet: str) -> dict[str, str]:
    """Cut a sprite sheet into one SVG text for each code point, such as "1F436"."""
    starts = [match.start() for match in re.finditer(r"<svg (?=[^>]*\bid=\"[0-9A-F-]+\")", sheet)]
    ends = [*starts[1:], sheet.rindex("</svg>")]
    drawings = {}
    for start, end in zip(starts, ends, strict=True):
        drawing = sheet[start:end]
        head, body = drawing.split(">", 1)
        codepoint = re.search(r'\bid="([0-9A-F-]+)"', head)
        view_box = re.search(r'viewBox="([^"]+)"', head)
        if codepoint and view_box:
            drawings[codepoint[1]] = f'<svg {XMLNS} viewBox="{view_box[1]}">{body}'
    return drawings


def render(svg: str) -> np.ndarray:
    """Draw one SVG on a transparent square: [256, 256, 4], uint8."""
    from resvg_py import svg_to_bytes

    png = svg_to_bytes(svg_string=svg, width=SIDE_PX, height=SIDE_PX)
    picture = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    canvas = Image.new("RGBA", (SIDE_PX, SIDE_PX))
    canvas.paste(picture, ((SIDE_PX - picture.width) // 2, (SIDE_PX - picture.height) // 2))
    return np.asarray(canvas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sheet", type=Path, help="sprites/all.svg of @svgmoji/noto")
    parser.add_argument("output", type=Path, help="the .npz to write")
    arguments = parser.parse_args()
    drawings = split_sheet(arguments.sheet.read_text(encoding="utf-8"))
    sprites = np.stack([render(drawings[concept.codepoint]) for concept in read_concepts()])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.output, sprites=sprites)
    print(f"{arguments.output}: {sprites.shape}, {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
