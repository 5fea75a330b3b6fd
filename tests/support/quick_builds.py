"""Graphs of the backend "eager", built without a worker process and loaded once for all tests.

They are programs without state, so all tests may share them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from onediff_ext.backends.eager import EagerBackend
from onediff_ext.building.build_progress import BuildProgress, ProgressListener
from onediff_ext.building.builder import Builder
from onediff_ext.core.errors import ExportError
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.blocks.block_kind import BlockKind
from tests.support.bare_programs import bare_programs
from tests.support.kept_exports import kept_exports

_BUILT: dict[str, bytes] = {}
_LOADED: dict[tuple[bytes, torch.device], Graph] = {}
_frozen = 0


@contextlib.contextmanager
def quick_loads() -> Iterator[None]:
    """Within the block, each graph is loaded only once in this process."""
    slow = EagerBackend.load

    def load(backend: EagerBackend, payload: bytes, device: torch.device) -> Graph:
        if (payload, device) not in _LOADED:
            # A GPU's program is moved to its device, which reads the sizes of its tensors.
            with bare_programs() if device.type == "cpu" else contextlib.nullcontext():
                _LOADED[payload, device] = slow(backend, payload, device)
        return _LOADED[payload, device]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerBackend, "load", load)
        yield


def freeze_loaded() -> None:
    """Spare later garbage collections the loaded graphs, which stay to the end of the process.

    A graph has ten thousand objects. What is no graph is collected first, so this is for the time
    between two tests, when they have let go of theirs.
    """
    global _frozen
    if _frozen != len(_LOADED):
        _frozen = len(_LOADED)
        gc.collect()
        gc.freeze()


@contextlib.contextmanager
def quick_builds() -> Iterator[None]:
    """Within the block, the backend "eager" builds without workers, each kind only once."""
    slow = Builder.build

    def build(
        builder: Builder,
        kinds: Sequence[BlockKind],
        listen: ProgressListener | None = None,
        **how: Any,
    ) -> None:
        context = builder.context
        replaced = {"build_in", "new_worker"} & vars(context).keys()  # a test is about these
        if context.backend.name != "eager" or replaced:
            slow(builder, kinds, listen, **how)
            return
        for done, kind in enumerate(kinds, 1):
            if kind.key.digest not in _BUILT:
                try:
                    _BUILT[kind.key.digest] = kind.export()
                except ExportError as exc:
                    context.outcomes.fail_kind(kind, exc, attempts=1, lasting=False)
                    continue
            payload = _BUILT[kind.key.digest]
            context.outcomes.store_built_graph(kind, payload, 0.0)
            kind.accept(context.load(payload, kind.device), "built")
            if listen is not None:
                listen(BuildProgress(done, len(kinds), kind.label, 0.0))

    with kept_exports(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Builder, "build", build)
        yield
