"""Run a VAE over overlapping, blended tiles, with diffusers' own tiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from onediff_ext.engine.patches import Patches

# Sides of a tile in latent cells, largest first. Fewer tiles are closer to the whole picture,
# since norms see more of it (docs/vae.md). Below 256 pixels they see too little.
TILE_CELLS = (128, 96, 64, 48, 32)
_NARROWEST_CELLS = 4


def can_tile(vae: Any) -> bool:
    """Whether diffusers can run this VAE over square tiles."""
    return all(hasattr(vae, name) for name in ("tile_latent_min_size", "tile_sample_min_size"))


class Tiles(NamedTuple):
    """Square tiles that overlap, in latent cells.

    Args:
        side: Of each tile.
        overlap: Cells that neighbours share; they are blended.
    """

    side: int
    overlap: int

    def last(self, cells: int) -> int:
        """Return the cells of the last tile along a direction of so many cells."""
        stride = self.side - self.overlap
        return cells - stride * ((cells - 1) // stride) if cells > self.side else cells


def choose_tiles(height_cells: int, width_cells: int, most_cells: int) -> Tiles:
    """Return the largest tiles whose last row and column are not too narrow.

    diffusers places tiles from the upper left. The last ones are as wide as the rest. The norms of
    a strip of one cell see only that strip, so it differs visibly from the whole picture.

    Args:
        height_cells, width_cells: Of the whole latent.
        most_cells: The largest side.

    Returns:
        Tiles with a side of at least half of `most_cells`, a multiple of 4. They overlap by a
        quarter; by up to a half where no quarter fits.
    """
    sides = range(most_cells, most_cells // 2 - 1, -4)
    choices = [Tiles(side, side // 4) for side in sides]
    choices += [
        Tiles(side, overlap)
        for side in sides
        for overlap in range(side // 4 + 1, side // 2 + 1)
        # diffusers rounds the overlap down from a fraction of the side.
        if int(side * (1 - overlap / side)) == side - overlap
        and int(side * (overlap / side)) == overlap
    ]

    def narrowest(tiles: Tiles) -> int:
        return min(tiles.last(height_cells), tiles.last(width_cells))

    wide_enough = (tiles for tiles in choices if narrowest(tiles) >= _NARROWEST_CELLS)
    return next(wide_enough, None) or max(choices, key=narrowest)


@contextmanager
def tiles_of(vae: Any, tiles: Tiles) -> Iterator[None]:
    """Run the VAE over tiles within this ``with`` block; all settings are restored after it."""
    cell_px = 2 ** (len(vae.config.block_out_channels) - 1)
    with Patches() as patches:
        for name, value in (
            ("use_tiling", True),
            ("tile_latent_min_size", tiles.side),
            ("tile_sample_min_size", tiles.side * cell_px),
            ("tile_overlap_factor", tiles.overlap / tiles.side),
        ):
            patches.set(vae, name, value)
        yield
