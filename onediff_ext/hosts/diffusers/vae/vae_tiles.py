"""Running a VAE over tiles that overlap and are blended, by diffusers' own means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onediff_ext.engine.patches import Patches

# Sides of a tile in latent cells, largest first: the fewer tiles, the closer to the whole
# picture, since norms see more of it (docs/vae.md). Below 256 pixels they see too little.
TILE_CELLS = (128, 96, 64, 48, 32)
_OVERLAP = 0.25
_NARROWEST_CELLS = 4


def can_tile(vae: Any) -> bool:
    """Whether diffusers can run this VAE over square tiles."""
    return all(hasattr(vae, name) for name in ("tile_latent_min_size", "tile_sample_min_size"))


def tile_side(height_cells: int, width_cells: int, most_cells: int) -> int:
    """The largest side of a tile that leaves no last row or column of a few cells only.

    diffusers lays tiles from the upper left, each 3/4 of its side after the one before, and the
    last ones are as wide as what is left. A strip of one cell, whose norms see nothing but that
    strip, is plainly further from the whole picture than the rest.

    Returns:
        At most `most_cells`, at least half of it, and a multiple of 4 as it is, so that overlaps
        are whole cells.
    """
    for side in range(most_cells, most_cells // 2 - 1, -4):
        if all(_last(cells, side) >= _NARROWEST_CELLS for cells in (height_cells, width_cells)):
            return side
    return most_cells


def _last(cells: int, side: int) -> int:
    """How many cells the last tile along one direction has."""
    stride = side - side // 4
    return cells - stride * ((cells - 1) // stride) if cells > side else cells


@contextmanager
def tiles_of(vae: Any, side_cells: int) -> Iterator[None]:
    """Within this ``with`` block the VAE runs over tiles; everything is put back after it."""
    cell_px = 2 ** (len(vae.config.block_out_channels) - 1)
    with Patches() as patches:
        for name, value in (
            ("use_tiling", True),
            ("tile_latent_min_size", side_cells),
            ("tile_sample_min_size", side_cells * cell_px),
            ("tile_overlap_factor", _OVERLAP),
        ):
            patches.set(vae, name, value)
        yield
