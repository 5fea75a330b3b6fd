"""Scenes: objects with positions, a background, and a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from tools.demo_model.backgrounds import COLORS, NAMES, draw_backgrounds
from tools.demo_model.captions import plural, say_objects, say_scene, with_article
from tools.demo_model.concepts import Concept

MOST_OBJECTS = 3


@dataclass(frozen=True)
class Placement:
    """One object: its index in concepts.tsv, its centre and its side in pixels."""

    concept: int
    x_px: float
    y_px: float
    side_px: float


@dataclass(frozen=True)
class Scene:
    """One training picture, not yet drawn."""

    caption: str
    background: int
    variation: tuple[float, float, float, float]
    placements: tuple[Placement, ...]


def _place(
    concepts: Sequence[int], height_px: int, width_px: int, scale: float, choice: Random
) -> tuple[Placement, ...]:
    count = len(concepts)
    upright = height_px > width_px
    long_px = max(height_px, width_px)
    cell_px = long_px / count
    side_px = min(cell_px, height_px, width_px) * scale
    placements = []
    for index, concept in enumerate(concepts):
        along = (index + 0.5) * cell_px + (cell_px - side_px) * choice.uniform(-0.3, 0.3)
        across_px = min(height_px, width_px)
        across = across_px / 2 + (across_px - side_px) * choice.uniform(-0.3, 0.3)
        x_px, y_px = (across, along) if upright else (along, across)
        placements.append(Placement(concept, x_px, y_px, side_px))
    return tuple(placements)


def make_scene(concepts: list[Concept], height_px: int, width_px: int, choice: Random) -> Scene:
    """Invent one scene for a picture of the given size."""
    background = choice.choices(range(len(NAMES)), weights=[3, *[1] * 11, *[1.6] * 6])[0]
    scale = choice.uniform(0.78, 0.92)
    pick = choice.random()
    if pick < 0.62:
        chosen = [choice.randrange(len(concepts))]
        name = choice.choice(concepts[chosen[0]].names)
        objects = say_objects([name], choice)
        if pick < 0.06 and objects == with_article(name) and objects != name:
            scale = choice.uniform(0.42, 0.5)
            objects = f"a small {name}"
    elif pick < 0.92:
        several = MOST_OBJECTS if max(height_px, width_px) >= 192 and pick > 0.84 else 2
        chosen = choice.sample(range(len(concepts)), several)
        objects = say_objects([choice.choice(concepts[i].names) for i in chosen], choice)
    else:
        several = choice.choice((2, 3)) if max(height_px, width_px) >= 192 else 2
        only = choice.randrange(len(concepts))
        counted = plural(concepts[only].names[0])
        chosen = [only] * several if counted else [only]
        objects = (
            f"{('two', 'three')[several - 2]} {counted}" if counted else concepts[only].names[0]
        )
    return Scene(
        caption=say_scene(objects, NAMES[background], choice),
        background=background,
        variation=(choice.random(), choice.random(), choice.random(), choice.random()),
        placements=_place(chosen, height_px, width_px, scale, choice),
    )


def plain_scene(concept: int, side_px: int, background: str = "white") -> Scene:
    """One object in the middle of a square: what a reference thumbnail shows."""
    middle = Placement(concept, side_px / 2, side_px / 2, side_px * 0.85)
    return Scene("", list(COLORS).index(background), (0.5, 0.5, 0.5, 0.5), (middle,))


class SceneDrawer:
    """Draws scenes of one size from the sprites, whole batches at a time."""

    def __init__(self, sprites: Tensor) -> None:
        """Take sprites [N, S, S, 4] (uint8, straight alpha), cropped to the drawing and centred."""
        straight = torch.stack([_fill_square(s) for s in sprites.permute(0, 3, 1, 2) / 255])
        full = torch.cat([straight[:, :3] * straight[:, 3:], straight[:, 3:]], dim=1)
        # Smaller copies, so that shrinking an object by grid_sample does not alias.
        self._mips = {
            side: functional.interpolate(full, (side, side), mode="area").half()
            for side in (256, 128, 64, 32)
        }

    def draw(self, scenes: Sequence[Scene], height_px: int, width_px: int) -> Tensor:
        """Draw scenes: [B, 3, H, W] in 0..1, on the sprites' device."""
        device = self._mips[256].device
        kinds = torch.tensor([scene.background for scene in scenes], device=device)
        variation = torch.tensor([scene.variation for scene in scenes], device=device)
        picture = draw_backgrounds(kinds, variation, height_px, width_px)
        for mip_side, mip in self._mips.items():
            for slot in range(MOST_OBJECTS):
                layer = [
                    (row, scene.placements[slot])
                    for row, scene in enumerate(scenes)
                    if slot < len(scene.placements)
                    and _mip_for(scene.placements[slot].side_px) == mip_side
                ]
                if layer:
                    self._paste(picture, mip, layer)
        return picture

    @staticmethod
    def _paste(picture: Tensor, mip: Tensor, layer: list[tuple[int, Placement]]) -> None:
        height_px, width_px = picture.shape[2:]
        device = picture.device
        rows = torch.tensor([row for row, _ in layer], device=device)
        places = torch.tensor(
            [(p.concept, p.x_px, p.y_px, p.side_px) for _, p in layer], device=device
        )
        concept, x_px, y_px, side_px = places.unbind(1)
        x = (torch.arange(width_px, device=device) + 0.5 - x_px[:, None]) / (side_px[:, None] / 2)
        y = (torch.arange(height_px, device=device) + 0.5 - y_px[:, None]) / (side_px[:, None] / 2)
        grid = torch.stack(
            [x[:, None].expand(-1, height_px, -1), y[:, :, None].expand(-1, -1, width_px)], dim=-1
        )
        pasted = functional.grid_sample(mip[concept.long()].float(), grid, align_corners=False)
        picture[rows] = picture[rows] * (1 - pasted[:, 3:]) + pasted[:, :3]


def _mip_for(side_px: float) -> int:
    return next(side for side in (32, 64, 128, 256) if side_px <= side or side == 256)


def _fill_square(sprite: Tensor) -> Tensor:
    """Crop a sprite [4, S, S] to what is drawn, then scale it to fill the square again."""
    drawn = sprite[3] > 0.02
    rows, columns = (torch.nonzero(drawn.any(dim=axis)).flatten() for axis in (1, 0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    side_px = max(int(bottom - top), int(right - left))
    square = sprite.new_zeros(4, side_px, side_px)
    y_px, x_px = (side_px - int(bottom - top)) // 2, (side_px - int(right - left)) // 2
    square[:, y_px : y_px + int(bottom - top), x_px : x_px + int(right - left)] = sprite[
        :, top:bottom, left:right
    ]
    side = sprite.shape[-1]
    return functional.interpolate(
        square[None], (side, side), mode="bilinear", antialias=True, align_corners=False
    )[0]
