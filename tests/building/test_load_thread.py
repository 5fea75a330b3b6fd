"""The thread that loads graphs."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch

from onediff_ext.building import graph_loader
from onediff_ext.building.build_jobs import Job
from onediff_ext.building.build_share import BuildShare
from onediff_ext.building.foreground_scheduler import ForegroundScheduler
from onediff_ext.building.graph_loader import GraphLoader
from onediff_ext.building.load_thread import LoadResult, LoadThread


def test_a_script_that_ends_while_graphs_come_in_sees_no_error() -> None:
    """Python ends all pools of threads first, and only then this session's builds."""
    reported: list[LoadResult] = []
    unused: Any = None
    loads = LoadThread(unused, True, reported.append, threading.Event())
    loads.stop()
    job = Job(unused, ExitStack())
    loads.submit(job, b"", "built")
    assert reported == [LoadResult(job, False, None)]


CPU = torch.device("cpu")


class Steps:
    """A backend whose first load needs three steps. A picture and the run's end come in the second.

    Attributes:
        turns: The number of turns granted when each step ran.
    """

    def __init__(self, foreground: ForegroundScheduler, stop: threading.Event) -> None:
        self._foreground, self._stop = foreground, stop
        self.granted = 0
        self.turns: list[int] = []

    def loading_steps(self, device: torch.device) -> Any:
        return [self._step, self._interrupted_step, self._step]

    def _step(self) -> None:
        self.turns.append(self.granted)

    def _interrupted_step(self) -> None:
        self._step()
        self._foreground.begin_picture()
        self._stop.set()


def test_what_the_first_load_needs_is_done_once_in_turns_of_its_own(monkeypatch: Any) -> None:
    foreground, stop = ForegroundScheduler(), threading.Event()
    backend: Any = Steps(foreground, stop)
    turn = foreground.turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        backend.granted += 1
        return turn(*args, **kwargs)

    monkeypatch.setattr(foreground, "turn", counted)
    unused: Any = None
    loader = GraphLoader(backend, foreground, unused, BuildShare(foreground))
    loader.prepare(CPU, stop)
    assert backend.turns == [1, 2]
    foreground.end_picture()
    stop.clear()
    for _ in range(2):
        loader.prepare(CPU, stop)
        assert len(backend.turns) == 3


class Kind:
    """A kind on a GPU, as far as a loader knows it."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.is_coming = self.is_used = False

    def accept(self, graph: Any, source: str) -> None:
        self.is_used = True


def test_graphs_for_a_gpu_are_used_together(monkeypatch: Any) -> None:
    """Each change costs a picture a comparison with eager and new CUDA graphs."""
    seconds = 100.0
    monkeypatch.setattr(graph_loader.time, "monotonic", lambda: seconds)
    foreground = ForegroundScheduler()
    backend: Any = Steps(foreground, threading.Event())
    monkeypatch.setattr(backend, "loading_steps", lambda device: [])
    loader = GraphLoader(backend, foreground, lambda *_: "a graph", BuildShare(foreground))
    kinds: list[Any] = [Kind() for _ in range(3)]

    def take(kind: Any) -> None:
        loader.take(kind, b"", "built", in_background=True, stop=threading.Event())

    take(kinds[0])
    seconds += 4
    take(kinds[1])
    loader.use_due()
    assert [kind.is_used for kind in kinds] == [False, False, False]
    assert kinds[1].is_coming
    seconds += 1
    loader.use_due()
    assert [kind.is_used for kind in kinds] == [True, True, False]
    seconds += 60
    take(kinds[2])  # others may come at once
    loader.use_due()
    assert not kinds[2].is_used
    loader.use_ready()  # the builds have ended
    assert kinds[2].is_used
