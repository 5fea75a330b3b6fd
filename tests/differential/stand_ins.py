"""Doubles for the engine while sequences run: quick builds that can be held, and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from onediff_ext.backends.eager import EagerBackend
from onediff_ext.backends.inductor.backend import InductorBackend
from onediff_ext.building.builder import Builder
from onediff_ext.core.errors import OneDiffError
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.cuda_graphs import recorder
from tests.support import frozen_recorder, quick_builds

if TYPE_CHECKING:
    from tests.differential.world import World


@dataclass
class Figures:
    """Counted while a world lives."""

    graph_calls: int = 0
    world: World | None = None


def known_programs() -> dict[str, bytes]:
    """The exported programs that worlds share, as they are now."""
    return dict(quick_builds._BUILT)


@contextmanager
def stand_ins(device: str, programs: Mapping[str, bytes] | None = None) -> Iterator[Figures]:
    """Within it, calls of graphs and replays are counted, and a world can hold its builds.

    `programs` are those that a world begins with; None for all that are known.
    """
    figures = Figures()
    with ExitStack() as stack:
        on_gpu = torch.device(device).type == "cuda"
        if not on_gpu:
            stack.enter_context(quick_builds.quick_builds())
            stack.enter_context(quick_builds.quick_loads())
            stack.enter_context(_programs_of_one_world(figures, programs))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        backend: type[Any] = InductorBackend if on_gpu else EagerBackend
        patch.setattr(backend, "load", _counted_loads(backend.load, figures))
        kind = recorder._CudaRecording if on_gpu else frozen_recorder.FrozenRecording
        patch.setattr(kind, "replay", _counted_replays(kind.replay, figures))
        if not on_gpu:
            patch.setattr(Builder, "build", _held_builds(Builder.build, figures))
        yield figures


@contextmanager
def _programs_of_one_world(
    figures: Figures, programs: Mapping[str, bytes] | None
) -> Iterator[None]:
    """Programs are shared by all worlds if they were made while no feature was on: others may have
    been traced with what is just being tried."""
    shared = quick_builds._BUILT

    class Programs(dict[str, bytes]):
        def __setitem__(self, digest: str, payload: bytes) -> None:
            super().__setitem__(digest, payload)
            if figures.world is None or figures.world.is_plain:
                shared[digest] = payload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick_builds, "_BUILT", Programs(shared if programs is None else programs))
        yield


def _counted_loads(load: Callable[..., Graph], figures: Figures) -> Callable[..., Graph]:
    def counted(*args: Any, **kwargs: Any) -> Graph:
        graph = load(*args, **kwargs)

        def run(arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            figures.graph_calls += 1
            return graph(arguments)

        return run

    return counted


def _counted_replays(replay: Callable[..., None], figures: Figures) -> Callable[..., None]:
    def counted(recording: Any) -> None:
        assert figures.world is not None
        figures.world.replays += 1
        figures.world.replaying = True
        try:
            replay(recording)
        finally:
            figures.world.replaying = False

    return counted


def _held_builds(build: Callable[..., None], figures: Figures) -> Callable[..., None]:
    def held(builder: Builder, kinds: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        hold = figures.world.hold if figures.world is not None else None
        some = kinds if hold is None else kinds[:hold]
        for kind in some:
            try:
                build(builder, [kind], *args, **kwargs)
            except OneDiffError as exc:  # for which a builder raises nothing
                builder.context.outcomes.fail_kind(kind, exc, attempts=1, lasting=False)
        if hold:
            figures.world.hold = 0  # type: ignore[union-attr]

    return held
