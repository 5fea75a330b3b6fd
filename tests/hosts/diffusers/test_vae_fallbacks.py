"""A VAE with too little memory: pictures one by one, then no CUDA graphs, then tiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.vae.vae_fallbacks import VaeFallbacks, VaeNote
from onediff_ext.hosts.diffusers.vae.vae_memory import needed_bytes
from onediff_ext.hosts.diffusers.vae.vae_tiles import TILE_CELLS, choose_tiles
from tests.support import models
from tests.support.vae_stand_ins import LimitedPart, MeasuredMemory, latents

Fit = Callable[..., tuple[torch.Tensor, list[VaeNote]]]
SIDE = 36  # cells, a little more than the smallest tile


@pytest.fixture(scope="module")
def vae() -> Any:
    return models.vae()


@pytest.fixture
def fit(vae: Any) -> Fit:
    """Decode latents with a given memory; return pixels and notes. The VAE stays unchanged."""

    def decode(z: torch.Tensor, memory: MeasuredMemory, tiling: str = "auto") -> Any:
        notes: list[VaeNote] = []
        before = dict(vars(vae))
        fitting = VaeFallbacks(vae, memory, tiling)
        try:
            with torch.no_grad():
                pixels = fitting.run("decoder", lambda x: vae.decode(x).sample, z, notes.append)
        finally:
            assert vars(vae) == before
        return pixels, notes

    return decode


@pytest.fixture
def limit(vae: Any) -> Any:
    """Limit the decoder for one test."""
    handles = []

    def put(part: LimitedPart) -> LimitedPart:
        handles.append(vae.decoder.register_forward_pre_hook(part))
        return part

    yield put
    for handle in handles:
        handle.remove()


def needs(vae: Any, pictures: int, cells: int) -> int:
    channels = vae.config.block_out_channels
    return needed_bytes("decoder", channels, pictures, 64 * cells, torch.float32)


def own(vae: Any, z: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        pixels: torch.Tensor = vae.decode(z).sample
    return pixels


def test_what_fits_is_left_alone(vae: Any, fit: Fit, limit: Any) -> None:
    part, z = limit(LimitedPart(10**6)), latents(2, SIDE, SIDE)
    memory = MeasuredMemory(needs(vae, 2, SIDE * SIDE))
    pixels, notes = fit(z, memory)
    assert part.sizes == [(2, SIDE, SIDE)]
    assert torch.equal(pixels, own(vae, z))
    assert (notes, memory.captures_given_up) == ([], 0)


def test_pictures_one_by_one_are_the_same(vae: Any, fit: Fit, limit: Any) -> None:
    part, z = limit(LimitedPart(10**6)), latents(3)
    memory = MeasuredMemory(needs(vae, 2, 64))
    pixels, notes = fit(z, memory)
    assert part.sizes == [(1, 8, 8)] * 3
    assert torch.allclose(pixels, own(vae, z), atol=1e-5)
    assert (notes, memory.captures_given_up) == ([], 0)


def test_captures_go_before_tiles(vae: Any, fit: Fit, limit: Any) -> None:
    part, z = limit(LimitedPart(10**6)), latents(1, SIDE, SIDE)
    needed = needs(vae, 1, SIDE * SIDE)
    memory = MeasuredMemory(needed // 2, in_captures=needed)
    _, notes = fit(z, memory)
    assert part.sizes == [(1, SIDE, SIDE)]
    assert (notes, memory.captures_given_up) == ([], 1)
    useless = MeasuredMemory(needed // 2, in_captures=needed // 4)
    _, notes = fit(z, useless)
    assert (len(notes), useless.captures_given_up) == (1, 0)  # they would not have been enough


def test_tiles_when_it_is_known_not_to_fit(vae: Any, fit: Fit, limit: Any) -> None:
    part, z = limit(LimitedPart(10**6)), latents(2, 67, 20)
    needed, free = needs(vae, 1, 67 * 20), needs(vae, 1, 50 * 20)
    pixels, notes = fit(z, MeasuredMemory(free))
    assert all(size[0] == 1 and max(size) <= 48 for size in part.sizes)
    assert any(max(size) > 32 for size in part.sizes)  # the largest tile that fits
    assert pixels.shape == (2, 3, 67 * 8, 20 * 8)
    assert [str(note) for note in notes] == [
        f"VAE decoded in tiles: {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB needed"
    ]
    assert pixels.isfinite().all()


def test_the_smallest_tiles_are_tried_however_little_there_is(fit: Fit, limit: Any) -> None:
    part = limit(LimitedPart(10**6))
    _, notes = fit(latents(1, SIDE, SIDE), MeasuredMemory(0))
    assert max(max(size) for size in part.sizes) == 32
    assert len(notes) == 1


@pytest.mark.parametrize("error", ["CUDA out of memory", "DefaultCPUAllocator: can't allocate"])
def test_running_out_of_memory_leads_on(fit: Fit, limit: Any, error: str) -> None:
    cuda = error.startswith("CUDA")
    raised = torch.OutOfMemoryError(error) if cuda else RuntimeError(error)
    part = limit(LimitedPart(48 * 20, raised))
    pixels, notes = fit(latents(2, 70, 20), MeasuredMemory(None))
    assert part.refused == [(2, 70, 20), (1, 70, 20), (1, 64, 20)]  # then a tile that fits
    assert {size[0] for size in part.sizes} == {1}
    assert pixels.shape == (2, 3, 560, 160)
    assert {str(note) for note in notes} == {"VAE decoded in tiles: it ran out of memory otherwise"}


def test_when_nothing_fits_the_error_reaches_the_caller(fit: Fit, limit: Any) -> None:
    limit(LimitedPart(16))
    with pytest.raises(torch.OutOfMemoryError):
        fit(latents(1, SIDE, SIDE), MeasuredMemory(None))


def test_other_errors_pass_at_once(fit: Fit, limit: Any) -> None:
    part = limit(LimitedPart(16, RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        fit(latents(1, SIDE, SIDE), MeasuredMemory(None))
    assert len(part.refused) == 1


def test_off_never_makes_tiles(vae: Any, fit: Fit, limit: Any) -> None:
    z = latents(2, SIDE, SIDE)
    expected, part = own(vae, z), limit(LimitedPart(SIDE * SIDE))
    pixels, notes = fit(z, MeasuredMemory(0), "off")  # an estimate may be wrong: it is tried
    assert (part.refused, part.sizes) == ([(2, SIDE, SIDE)], [(1, SIDE, SIDE)] * 2)
    assert torch.allclose(pixels, expected, atol=1e-3)
    assert notes == []
    limit(LimitedPart(100))
    with pytest.raises(torch.OutOfMemoryError):
        fit(z, MeasuredMemory(None), "off")


def test_on_makes_tiles_of_the_size_that_it_was_trained_on(fit: Fit, limit: Any) -> None:
    part = limit(LimitedPart(10**6))
    pixels, notes = fit(latents(1, 96, 16), MeasuredMemory(None), "on")
    assert {size[1] for size in part.sizes} == {64, 48}
    assert (pixels.shape, notes) == ((1, 3, 768, 128), [])  # it was asked for
    part.sizes.clear()
    fit(latents(1, 30, 20), MeasuredMemory(None), "on")
    assert part.sizes == [(1, 30, 20)]  # no larger than a tile


def test_an_unknown_way_is_refused(vae: Any) -> None:
    with pytest.raises(OptionError, match="auto, on, off"):
        VaeFallbacks(vae, MeasuredMemory(None), "sometimes")


@pytest.mark.parametrize("size", [(40, 36), (67, 5), (33, 33)], ids=str)
def test_encoding_in_tiles_keeps_every_size(vae: Any, size: tuple[int, int]) -> None:
    height, width = (8 * cells for cells in size)
    picture = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1
    notes: list[VaeNote] = []
    with torch.no_grad():
        fitting = VaeFallbacks(vae, MeasuredMemory(0))
        found = fitting.run("encoder", lambda x: vae.encode(x).latent_dist, picture, notes.append)
    assert found.parameters.shape == (1, 8, *size)
    assert found.parameters.isfinite().all()
    assert notes[0].what == "VAE encoded in tiles"


@given(st.integers(33, 2048), st.integers(4, 2048), st.sampled_from(TILE_CELLS))
@example(169, 181, 32)
@example(1922, 507, 32)
def test_sides_of_tiles(height: int, width: int, most: int) -> None:
    side, overlap = choose_tiles(height, width, most)
    assert side % 4 == 0
    assert side // 4 <= overlap <= side // 2
    assert most // 2 <= side <= most

    def narrowest(cells: int, side: int) -> int:
        if cells <= side:
            return cells
        # As `AutoencoderKL.tiled_decode` places them.
        stride = int(side * (1 - overlap / side))
        return min(min(side, cells - start) for start in range(0, cells, stride))

    assert min(narrowest(height, side), narrowest(width, side)) >= 4


def test_tiles_join_without_a_seam() -> None:
    """The demo's VAE on a photograph: tiles add no visible edges."""
    from PIL import Image

    from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint

    assets = Path(models.__file__).parents[2] / "onediff_ext" / "assets"
    vae = load_checkpoint(assets / "demo" / "onediff-demo.safetensors").pipeline.vae.float()
    with Image.open(assets / "photos" / "raccoon.jpg") as photo:
        pixels = photo.convert("RGB").resize((256, 320)).tobytes()
    picture = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(320, 256, 3)
    with torch.no_grad():
        z = vae.encode(picture.permute(2, 0, 1)[None] / 127.5 - 1).latent_dist.mode()
        whole = vae.decode(z).sample.clamp(-1, 1)
        fitting = VaeFallbacks(vae, MeasuredMemory(0))
        tiled = fitting.run("decoder", lambda x: vae.decode(x).sample, z, lambda _: None)
    difference = tiled.clamp(-1, 1) - whole
    assert 10 * torch.log10(4 / difference.square().mean()) > 28  # PSNR in dB
    steps = difference.diff(dim=2).abs().mean(dim=(0, 1, 3))  # between neighbouring rows
    assert difference.abs().max() > 1e-3  # there were tiles
    border = steps[8 * 24 - 1]  # where the second tile begins
    assert border < 3 * steps.median()
