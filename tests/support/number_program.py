"""A worker's program without models: it writes numbers into files."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onediff_ext.cluster.batch_queue import Unit
from onediff_ext.cluster.program import OpenProgram, Program
from onediff_ext.core.errors import CheckpointError, PictureError
from onediff_ext.store import GraphExchange


@dataclass(frozen=True)
class NumberProgram(Program):
    """Appends a line to a file for each picture.

    Args:
        folder: Of the files.
        seconds: Of each unit.
        fatal: (batch, position) that ends the worker's process.
        failing: Batch whose drawing raises an error of Python's own.
        reported: Folder where the driver makes a file for each picture that it was told of. The
            fatal picture waits for all that its worker drew; with None it does not wait.
        full: The disk is full.
        broken: The checkpoint cannot be loaded.
        dies_at_start: The worker's process ends while it loads the checkpoint.
    """

    folder: Path
    seconds: float = 0.01
    fatal: tuple[int, int] | None = None
    failing: int | None = None
    reported: Path | None = None
    full: bool = False
    broken: bool = False
    dies_at_start: bool = False

    def open(self, name: str, exchange: GraphExchange | None, prepared: Any = None) -> OpenProgram:
        if self.dies_at_start:
            os._exit(11)
        if self.broken:
            raise CheckpointError("The checkpoint is broken.", "Take another one.")
        return _Open(self)


class _Open(OpenProgram):
    def __init__(self, program: NumberProgram) -> None:
        self._program = program
        self._drawn: list[str] = []  # files that this worker writes

    def read(self, task: Unit) -> Unit:
        return task

    def draw(self, read: Unit) -> Unit:
        program = self._program
        time.sleep(program.seconds)
        if program.fatal is not None:
            batch, position = program.fatal
            if read.batch == batch and position in read.positions:
                self._wait_until_reported()
                os._exit(11)
        if read.batch == program.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._drawn += [path.name for path in self._paths(read)]
        return read

    def _paths(self, unit: Unit) -> list[Path]:
        positions = unit.positions if unit.writes else ()
        folder = self._program.folder
        return [folder / f"{unit.group}-{unit.batch}-{position}" for position in positions]

    def _wait_until_reported(self) -> None:
        reported = self._program.reported
        ends_at = time.monotonic() + 60
        while reported is not None and not all((reported / name).exists() for name in self._drawn):
            if time.monotonic() > ends_at:
                raise AssertionError("The driver was not told of a picture within 60 s.")
            time.sleep(0.01)

    def write(self, drawn: Unit) -> list[Path]:
        if self._program.full:
            raise PictureError("a.png cannot be written.", "The disk is full.")
        paths = self._paths(drawn)
        for path in paths:
            with path.open("a") as file:
                file.write("written\n")
        return paths

    def about(self) -> dict[str, Any]:
        return {"device": "none"}

    def close(self) -> None:
        pass
