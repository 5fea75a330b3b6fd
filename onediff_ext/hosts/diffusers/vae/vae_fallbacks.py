"""In which ways a VAE may run over pictures, best first, when memory is short."""

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
from onediff_ext.hosts.diffusers.vae.vae_tiles import TILE_CELLS, can_tile, tile_side, tiles_of

logger = logging.getLogger(__name__)

TILING = ("auto", "on", "off")


@dataclass(frozen=True)
class VaeNote:
    """Something that the user should know of how a VAE was run.

    Args:
        what: Equal for notes of one kind, such as ``"VAE decoded in tiles"``.
        why: With figures, which may differ from picture to picture.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True)
class _Way:
    """Args:
    one_by_one: Each picture of the batch alone; gives the same pictures.
    tile_cells: Side of the tiles, or None for whole pictures.
    why: Why tiles, if it is known before it is tried.
    """

    one_by_one: bool = False
    tile_cells: int | None = None
    why: str = ""


class VaeFallbacks:
    """Runs a VAE in the best way that fits: whole batches, pictures one by one, tiles.

    Args:
        vae: An AutoencoderKL; another one without tiles is run without.
        memory: What there is on its device.
        tiling: "auto", "on" (whether it would fit or not) or "off".

    Raises:
        OptionError: `tiling` is none of these.
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
        """Call a part of the VAE so that it fits.

        Args:
            part: "encoder" or "decoder".
            call: The VAE's own encode or decode.
            given: Pictures [B, 3, H, W] or latents [B, C, H/8, W/8].
            note: Told when there will be tiles, which change a picture a little.

        Raises:
            torch.OutOfMemoryError, RuntimeError: Nothing fits.
        """
        error: BaseException | None = None
        for way in self._ways(part, given):
            if error is not None:
                logger.info("The VAE's %s ran out of memory: next try %s", part, way)
                self._memory.free_caches()
            if way.tile_cells is not None and self._tiling == "auto":
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
        channels = self._vae.config.block_out_channels
        cell_px = 2 ** (len(channels) - 1)
        height, width = (n if part == "decoder" else n // cell_px for n in given.shape[-2:])
        pictures = given.shape[0]

        def needs(count: int, cells: int) -> int:
            return needed_bytes(part, channels, count, cells * cell_px**2, given.dtype)

        one, free = needs(1, height * width), self._memory.free_bytes(given.device)
        if free is not None and free < one <= free + self._memory.bytes_of_captures():
            self._memory.give_up_captures()
            free = self._memory.free_bytes(given.device)
        ways = []
        # What is known not to fit is not tried, unless tiles are not wanted.
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
                ways.append(_Way(pictures > 1, tile_side(height, width, side), why))
        return ways or [_Way(pictures > 1)]

    @contextmanager
    def _set(self, way: _Way) -> Iterator[None]:
        with Patches() as patches, ExitStack() as stack:
            if way.one_by_one and hasattr(self._vae, "use_slicing"):
                patches.set(self._vae, "use_slicing", True)
            if way.tile_cells is not None:
                stack.enter_context(tiles_of(self._vae, way.tile_cells))
            yield


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
