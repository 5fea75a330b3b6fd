"""A worker's own side. Each unit has its own thread, which reads, waits for the drawing thread, and
writes; so the next unit is read and the last one is written while one is drawn."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import onediff_ext
from onediff_ext.cluster.program import OpenProgram, Program
from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.start_up_times import StartUpTimes, process_started_at
from onediff_ext.store import GraphExchange

RETURNED = "returned"


class Worker:
    """Runs a program's units; methods are called in several threads at once.

    Args:
        name: Of this worker.
        prepare: Called at once in the thread that draws, or None. The program gets what it returns.
    """

    def __init__(self, name: str, prepare: Callable[[], Any] | None = None) -> None:
        self._name = name
        self._times = StartUpTimes()
        self._times.steps["process"] = process_started_at()
        self._times.mark("worker")
        self._drawing = ThreadPoolExecutor(1, "onediff-draw")
        self._lock = threading.Lock()
        self._queued: dict[int, Future[Any]] = {}
        self._unwanted: set[int] = set()
        self._open: OpenProgram | None = None
        self._prepared: Future[Any] | None = None
        if prepare is not None:
            self._prepared = self._drawing.submit(prepare)
            self._prepared.add_done_callback(lambda _: self._times.mark("prepared"))

    def open(
        self, program: Program, exchange: GraphExchange | None
    ) -> tuple[dict[str, Any] | None, OneDiffError | None]:
        """Load the models, in the thread that draws.

        Args:
            program: What this worker does.
            exchange: Where graphs are shared, or None.

        Returns:
            What the worker tells of itself, or the error that every worker would have.
        """
        try:
            self._open = self._drawing.submit(self._open_program, program, exchange).result()
        except OneDiffError as exc:
            return None, exc
        self._times.mark("ready")
        return {**machine_facts(), **self._about(self._open)}, None

    def _open_program(self, program: Program, exchange: GraphExchange | None) -> OpenProgram:
        """Open the program, in the thread that has prepared it."""
        prepared = None if self._prepared is None else self._prepared.result()
        self._prepared = None
        return program.open(self._name, exchange, prepared)

    def run(self, ticket: int, task: Any) -> tuple[Any, dict[str, Any]] | str:
        """Do one unit.

        Returns:
            The outcome and what the worker tells of itself now; `RETURNED` when the unit was given
            back.
        """
        program = self._open
        assert program is not None
        read = program.read(task)
        with self._lock:
            if ticket in self._unwanted:
                self._unwanted.discard(ticket)
                return RETURNED
            drawing = self._queued[ticket] = self._drawing.submit(program.draw, read)
        try:
            drawn = drawing.result()
        except CancelledError:
            return RETURNED
        finally:
            with self._lock:
                del self._queued[ticket]
        outcome = program.write(drawn)
        self._times.mark("first unit")
        return outcome, self._about(program)

    def _about(self, program: OpenProgram) -> dict[str, Any]:
        about = program.about()
        steps = {**self._times.steps, **about.get("start_up", {})}
        return {**about, "start_up": steps}

    def give_back(self, ticket: int) -> None:
        """Let `run` of a unit return at once, unless it is being drawn."""
        with self._lock:
            drawing = self._queued.get(ticket)
            if drawing is None:
                self._unwanted.add(ticket)  # it is still being read, or done
            else:
                drawing.cancel()

    def close(self) -> None:
        """End builds that still run."""
        if self._open is not None:
            self._open.close()


def machine_facts() -> dict[str, Any]:
    """Return what tells this worker's process and machine from others."""
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "version": onediff_ext.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
