"""What a worker of `cluster_faults` does: it has a store of its own and notes what it writes."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onediff_ext.cli.cluster_programs import Img2ImgProgram
from onediff_ext.cluster.program import OpenProgram, Program
from onediff_ext.store import GraphExchange


@dataclass(frozen=True)
class NodeProgram(Program):
    """Image to image with a store for each node, though all nodes are one machine.

    Args:
        program: The run's own; its store is a prefix.
        log: Gets a line for each written file.
        filled: A store that each node begins with a copy of.
    """

    program: Img2ImgProgram
    log: Path
    filled: Path | None = None

    def open(self, name: str, exchange: GraphExchange | None, prepared: Any = None) -> OpenProgram:
        import ray

        from onediff_ext.pictures.batch import run_batches

        module: Any = run_batches
        module.write_png = _noting(module.write_png, self.log)
        node = ray.get_runtime_context().get_node_id()[:8]
        arguments = copy.copy(self.program.arguments)
        arguments.store = Path(f"{arguments.store}-{node}")
        if self.filled is not None and not arguments.store.exists():
            shutil.copytree(self.filled, arguments.store)
        return replace(self.program, arguments=arguments).open(name, exchange, prepared)


def _noting(write: Callable[..., None], log: Path) -> Callable[..., None]:
    def write_and_note(path: Path, *arguments: Any, **named: Any) -> None:
        write(path, *arguments, **named)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, f"{path}\n".encode())
        finally:
            os.close(descriptor)

    return write_and_note
