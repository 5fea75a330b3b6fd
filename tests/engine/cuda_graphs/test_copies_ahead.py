"""Copies ahead: what waits for what, by streams that take notes, and the numbers on a real GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from onediff_ext.engine.cuda_graphs import copies_ahead
from onediff_ext.engine.cuda_graphs.copies_ahead import ALIGNMENT, CopiesAhead
from onediff_ext.hosts.pinned_memory import PinnedMemory

GPU = torch.device("meta")


class Stream:
    """Notes which of another stream's work has ended before its own begins.

    Attributes:
        work: Names of what was launched.
        after: For each of these, the names of all other work that has certainly ended.
    """

    def __init__(self, *_: Any) -> None:
        self.work: list[str] = []
        self.after: dict[str, set[str]] = {}
        self._waited: set[str] = set()

    def launch(self, name: str) -> None:
        self.after[name] = {*self.work, *self._waited}
        self.work.append(name)

    def record_event(self) -> set[str]:
        return {*self.work, *self._waited}

    def wait_event(self, event: set[str]) -> None:
        self._waited |= event


class Streams:
    """The recorded stream, the second one, and which of both is current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.side = Stream(), Stream()
        self.current = self.main
        monkeypatch.setattr(copies_ahead, "_side_streams", {})
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.main)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.Tensor, "copy_", self._copy)
        self.block = 0

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main

    def _copy(self, target: torch.Tensor, *_: Any, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        self.current.launch(f"copy {self.block}")
        return target


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def run_blocks(streams: Streams, sizes: list[int]) -> list[int]:
    """Copy weights of so many bytes for each block, then run it. Returns the buffers' `id`s."""
    ahead, buffers = CopiesAhead(GPU), []
    for streams.block, size in enumerate(sizes):
        copies = ahead.copy([torch.empty(size, dtype=torch.uint8)])
        buffers.append(copies[0].untyped_storage()._cdata)
        streams.main.launch(f"block {streams.block}")
    return buffers


def test_copies_are_made_while_the_block_before_runs(streams: Streams) -> None:
    buffers = run_blocks(streams, [1000] * 6)
    assert buffers == [buffers[0], buffers[1]] * 3
    for n in range(2, 6):
        done = streams.side.after[f"copy {n}"]
        assert f"block {n - 2}" in done  # it has read the same buffer
        assert f"block {n - 1}" not in done
        assert f"copy {n}" in streams.main.after[f"block {n}"]


def test_a_new_buffer_waits_for_all_before(streams: Streams) -> None:
    """Its memory may be that of the activations of the block before."""
    run_blocks(streams, [1000, 1000, 1000, 2000, 1000, 2000])
    assert "block 2" in streams.side.after["copy 3"]
    assert "block 3" not in streams.side.after["copy 4"]
    assert "block 4" not in streams.side.after["copy 5"]


def test_all_recordings_share_one_second_stream(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch hands out its 32 streams in turn: another one might be somebody else's."""
    made: list[Stream] = []

    def make(_: torch.device) -> Stream:
        made.append(Stream())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    for _ in range(3):
        CopiesAhead(GPU)
    assert len(made) == 1
    assert streams.main not in made


def test_copies_have_the_form_of_the_weights() -> None:
    weights = [
        torch.randn(3, 5).half(),
        torch.randn(5, 7).t(),
        torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.empty(0),
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        Streams(monkeypatch)
        copies = CopiesAhead(GPU).copy(weights)
    for weight, copied in zip(weights, copies, strict=True):
        assert (copied.dtype, copied.shape) == (weight.dtype, weight.shape)
        assert copied.stride() == weight.stride()
        assert copied.storage_offset() * copied.element_size() % ALIGNMENT == 0
    places = [(w.storage_offset() * w.element_size(), w.nbytes) for w in copies]
    assert all(end >= at + size for (at, size), (end, _) in itertools.pairwise(places))


@pytest.mark.gpu
def test_the_numbers_of_a_recording() -> None:
    gpu, memory, noise = torch.device("cuda", 0), PinnedMemory(), torch.Generator().manual_seed(0)
    widths = [int(n) for n in torch.randint(64, 1500, (41,), generator=noise)]
    weights = []
    memory.begin_move()
    for rows, columns in itertools.pairwise(widths):
        weight = torch.randn(rows, columns, generator=noise) / rows**0.5
        pinned = memory.copy(weight, gpu)
        assert pinned is not None
        weights.append(pinned)
    x = torch.randn(256, widths[0], generator=noise).to(gpu)

    def chain(ahead: CopiesAhead | None) -> torch.Tensor:
        found = x
        for weight in weights:
            copied = weight.to(gpu) if ahead is None else ahead.copy([weight])[0]
            found = torch.relu(found @ copied) + found.mean()
        return found

    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        chain(None)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        recorded = chain(CopiesAhead(gpu))
        graph.capture_end()
    for _ in range(10):
        for weight in weights:
            weight.mul_(1.05)
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(recorded, chain(None), rtol=1e-4, atol=1e-5)
    memory.end_move()
