"""Short of memory: what is given up, in which order, and that no graph pays for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.engine.running import graph_check
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.probe import unet_inputs
from onediff_ext.session.session import Session
from tests.support import models
from tests.support.frozen_recorder import FrozenRecorder

OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class FullMemory:
    """A graph that finds no memory for inputs above a size.

    Args:
        graph: Does what fits.
        most: Numbers in the largest input.
        error: What it raises.
    """

    def __init__(self, graph: Any, most: int, error: Exception) -> None:
        self._graph, self._most, self._error = graph, most, error
        self.refused, self.batches = 0, []

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        if max(tensor.numel() for tensor in tensors) > self._most:
            self.refused += 1
            raise self._error
        self.batches.append(tensors[-1].shape[0])  # the image comes last
        return self._graph(tensors)


@pytest.fixture
def pipe(session: Session) -> Iterator[Any]:
    pipe = models.sd15(seed=3)
    compile_pipe(pipe, session=session, ignores=["vae_encoder"])
    yield pipe
    undo_compile(pipe)


def latents(pictures: int = 1, height: int = 8, width: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(pictures, 4, height, width, generator=generator)


@torch.no_grad()
def decode(pipe: Any, z: torch.Tensor) -> torch.Tensor:
    pixels: torch.Tensor = pipe.vae.decode(z).sample
    return pixels


@pytest.fixture
def kinds(pipe: Any, session: Session) -> list[Any]:
    """The decoder's, compared with eager."""
    for _ in range(2):
        decode(pipe, latents())
    kinds = next(c for c in compiled_state(pipe).components if c.name == "vae_decoder").kinds()
    assert {kind.state for kind in kinds} == {KindState.READY}
    return kinds


def fill(kinds: list[Any], most: int, error: Exception = OOM) -> list[FullMemory]:
    for kind in kinds:
        kind.graph = FullMemory(kind.graph, most, error)
    return [kind.graph for kind in kinds]


def empty(kinds: list[Any]) -> None:
    for kind in kinds:
        kind.graph = kind.graph._graph


@pytest.mark.parametrize(
    "error",
    [
        OOM,
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: str(error)[:12],
)
def test_a_graph_without_memory_stays_a_graph(
    pipe: Any, session: Session, kinds: list[Any], error: Exception
) -> None:
    expected = decode(pipe, latents())
    full = fill(kinds, 0, error)
    found = decode(pipe, latents())  # at last without graphs
    assert torch.allclose(found, expected, atol=1e-4)
    assert any(graph.refused for graph in full)
    empty(kinds)
    assert {kind.state for kind in kinds} == {KindState.READY}
    assert [f.reason for f in session.fallbacks() if f.what == "VAE decoder"] == ["memory is short"]
    before = len(session.fallbacks())
    assert torch.equal(decode(pipe, latents()), expected)  # with graphs again
    assert len(session.fallbacks()) == before


@torch.no_grad()
def test_captures_are_given_up_for_the_vae(
    pipe: Any, session: Session, kinds: list[Any], recorder: FrozenRecorder
) -> None:
    inputs = unet_inputs(pipe.unet, torch.Generator().manual_seed(0))
    for _ in range(4):
        pipe.unet(**inputs)
    assert len(session.cuda_graphs) == 1
    expected = decode(pipe, latents())

    class HeldByCaptures(FullMemory):
        """Has memory as soon as captures are gone."""

        def __call__(self, tensors: list[torch.Tensor]) -> Any:
            self._most = 0 if len(session.cuda_graphs) else 10**9
            return super().__call__(tensors)

    graph = kinds[0].graph
    kinds[0].graph = held = HeldByCaptures(graph, 0, OOM)
    assert torch.equal(decode(pipe, latents()), expected)
    kinds[0].graph = graph
    assert held.refused == 1
    assert len(session.cuda_graphs) == 0
    assert session.cuda_graphs.dropped[-1] == "1 CUDA graph dropped: memory is short"


def test_nothing_of_an_attempt_is_left_at_the_next_one(
    pipe: Any, session: Session, kinds: list[Any]
) -> None:
    """The error that a graph raised holds the frames of all that called it."""
    graph, given, alive = kinds[-1].graph, [], []

    def full(tensors: list[torch.Tensor]) -> torch.Tensor:
        alive.append(sum(known() is not None for known in given))
        given.append(weakref.ref(tensors[-1]))
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    kinds[-1].graph = full
    assert decode(pipe, latents(2)).isfinite().all()
    kinds[-1].graph = graph
    assert alive == [0, 0, 0]  # the whole batch twice, and half of it


def test_a_batch_is_decoded_in_halves(pipe: Any, session: Session, kinds: list[Any]) -> None:
    z = latents(2)
    expected = decode(pipe, z)
    # Input of the last blocks of one picture: 32 channels of 64x72 pixels.
    full = fill(kinds, 32 * 64 * 72)
    found = decode(pipe, z)
    empty(kinds)
    assert any(graph.refused for graph in full)
    assert all(graph.batches[-2:] == [1, 1] for graph in full)
    assert torch.allclose(found, expected, atol=1e-4)
    assert "memory is short" not in [fallback.reason for fallback in session.fallbacks()]


def test_what_the_model_itself_raises_reaches_the_caller(
    pipe: Any, session: Session, kinds: list[Any]
) -> None:
    """The host's own way out, such as tiles, begins there."""

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("the decoder's own")

    handle = pipe.vae.decoder.conv_out.register_forward_pre_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError, match="the decoder's own"):
        decode(pipe, latents())
    handle.remove()
    assert decode(pipe, latents()).isfinite().all()


def test_tiles_use_the_graphs_that_there_are(pipe: Any, session: Session, kinds: list[Any]) -> None:
    before, calls = len(session.kinds), sum(kind.calls for kind in kinds)
    vae = pipe.vae
    own = SimpleNamespace(use=vae.use_tiling, side=vae.tile_latent_min_size)
    vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size = True, 8, 64
    found = decode(pipe, latents(1, 11, 17))
    compiled = compiled_state(pipe).components[-1]
    with compiled.paused():
        expected = decode(pipe, latents(1, 11, 17))
    vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size = own.use, own.side, 512
    assert torch.allclose(found, expected, atol=1e-4)
    assert len(session.kinds) == before
    assert sum(kind.calls for kind in kinds) > calls
    assert session.fallbacks() == []


@pytest.mark.parametrize("short", ["graph", "comparison"])
def test_a_comparison_that_does_not_fit_waits(
    pipe: Any, session: Session, kinds: list[Any], short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run beside eager takes more than either: it must not cost the picture."""
    expected = decode(pipe, latents())
    for kind in kinds:
        kind.state = KindState.UNCHECKED
    if short == "graph":
        fill(kinds, 0)
    else:
        monkeypatch.setattr(graph_check, "compare_all", _no_room)
    assert torch.allclose(decode(pipe, latents()), expected, atol=1e-4)
    assert {kind.state for kind in kinds} == {KindState.UNCHECKED}
    assert {f.reason for f in session.fallbacks()} == {
        "no memory yet to compare its graph with eager"
    }
    if short == "graph":
        empty(kinds)
    monkeypatch.undo()
    assert torch.allclose(decode(pipe, latents()), expected, atol=1e-4)
    assert {kind.state for kind in kinds} == {KindState.READY}


def _no_room(*_: Any) -> Any:
    raise OOM
