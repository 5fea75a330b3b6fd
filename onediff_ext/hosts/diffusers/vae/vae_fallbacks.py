"""How a VAE runs when memory is short: whole batches, one picture at a time, or tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onediff_ext.core.errors import OptionError
from onediff_ext.engine.out_of_memory import is_out_of_memory
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.diffusers.vae.vae_memory import DeviceMemory, needed_bytes
from onediff_ext.hosts.diffusers.vae.vae_tiles import (
    TILE_CELLS,
    Tiles,
    can_tile,
    choose_tiles,
    tiles_of,
)

logger = logging.getLogger(__name__)

TILING = ("auto", "on", "off")


@dataclass(frozen=True)
class VaeNote:
    """A note for the user about how a VAE ran.

    Args:
        what: The kind of note, such as ``"VAE decoded in tiles"``.
        why: The reason with figures, which may differ between pictures.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class _Way:
    """One way to run the VAE.

    Args:
        one_by_one: Each picture of the batch alone; the result is the same.
        tiles: The tiles, or None for whole pictures.
        why: Why tiles are used, if that is known before the attempt.
    """

    one_by_one: bool = False
    tiles: Tiles | None = None
    why: str = ""


class VaeFallbacks:
    """Runs a VAE in the best way that fits into memory: whole batches, single pictures, tiles.

    Args:
        vae: An AutoencoderKL; a VAE class without tiling runs without tiles.
        memory: Memory of its device.
        tiling: "auto", "on" (always) or "off".

    Raises:
        OptionError: `tiling` is unknown.
    """

    def __init__(self, vae: Any, memory: DeviceMemory, tiling: str = "auto") -> None:
        if tiling not in TILING:
            raise OptionError(
                f"{tiling!r} is no way of tiling.", f"Choose one of {', '.join(TILING)}."
            )
        self._vae, self._memory, self._tiling = vae, memory, tiling

    def run(
        self,
        part: str,
        call: Callable[[torch.Tensor], Any],
        given: torch.Tensor,
        note: Callable[[VaeNote], None],
    ) -> Any:
        """Call a part of the VAE in a way that fits into memory.

        Args:
            part: "encoder" or "decoder".
            call: The VAE's own encode or decode.
            given: Pictures [B, 3, H, W] or latents [B, C, H/8, W/8].
            note: Called before tiles are used, which change a picture slightly.

        Raises:
            torch.OutOfMemoryError, RuntimeError: No way fits.
        """
        error: BaseException | None = None
        for way in self._ways(part, given):
            if error is not None:
                logger.info("The VAE's %s ran out of memory: next try %s", part, way)
                self._memory.free_caches()
            if way.tiles is not None and self._tiling == "auto":
                why = way.why or "it ran out of memory otherwise"
                note(VaeNote(f"VAE {part.removesuffix('r')}d in tiles", why))
            try:
                with self._set(way):
                    return call(given)
            except (RuntimeError, MemoryError) as exc:
                if not is_out_of_memory(exc):
                    raise
                error = exc.with_traceback(None)  # its frames hold the activations
        assert error is not None
        raise error

    def _ways(self, part: str, given: torch.Tensor) -> list[_Way]:
        channels = self._vae.config.get("block_out_channels")
        if channels is None:  # of another kind, such as Qwen-Image's VAE of videos
            return [_Way(), *([_Way(one_by_one=True)] if given.shape[0] > 1 else [])]
        cell_px = 2 ** (len(channels) - 1)
        height, width = (n if part == "decoder" else n // cell_px for n in given.shape[-2:])
        pictures = given.shape[0]

        def needs(count: int, cells: int) -> int:
            return needed_bytes(part, channels, count, cells * cell_px**2, given.dtype)

        one, free = needs(1, height * width), self._memory.free_bytes(given.device)
        if free is not None and free < one <= free + self._memory.cuda_graph_bytes():
            self._memory.drop_cuda_graphs()
            free = self._memory.free_bytes(given.device)
        ways = []
        # With tiling on, skip ways that do not fit into what is free.
        if self._tiling == "off" or free is None or needs(pictures, height * width) <= free:
            ways.append(_Way())
        if pictures > 1 and (self._tiling == "off" or free is None or one <= free):
            ways.append(_Way(one_by_one=True))
        if self._tiling == "off" or not can_tile(self._vae):
            return ways or [_Way(pictures > 1)]
        why, largest = "", max(TILE_CELLS)
        if self._tiling == "on":
            ways, largest = [], self._vae.config.sample_size // cell_px
        elif free is not None and one > free:
            why = f"{_gigabytes(free)} free, {_gigabytes(one)} needed"
        sides = [side for side in TILE_CELLS if side < max(height, width) and side <= largest]
        for side in sides:
            cells = min(side, height) * min(side, width)
            if free is None or side == sides[-1] or needs(1, cells) <= free:
                ways.append(_Way(pictures > 1, choose_tiles(height, width, side), why))
        return ways or [_Way(pictures > 1)]

    @contextmanager
    def _set(self, way: _Way) -> Iterator[None]:
        with Patches() as patches, ExitStack() as stack:
            if way.one_by_one and hasattr(self._vae, "use_slicing"):
                patches.set(self._vae, "use_slicing", True)
            if way.tiles is not None:
                stack.enter_context(tiles_of(self._vae, way.tiles))
            yield


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
