"""Graphs of the backend "eager", built without a process and read once for all tests.

They are programs without state, so all tests may share them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from onediff_ext.backends.eager import EagerBackend
from onediff_ext.building.builder import Builder, BuildProgress, ProgressListener
from onediff_ext.engine.backend_port import Graph
from onediff_ext.engine.blocks.block_kind import BlockKind

_BUILT: dict[str, bytes] = {}
_LOADED: dict[tuple[bytes, torch.device], Graph] = {}


@contextlib.contextmanager
def quick_loads() -> Iterator[None]:
    """Within it, a graph that was loaded before is the same one again."""
    slow = EagerBackend.load

    def load(backend: EagerBackend, payload: bytes, device: torch.device) -> Graph:
        if (payload, device) not in _LOADED:
            _LOADED[payload, device] = slow(backend, payload, device)
        return _LOADED[payload, device]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerBackend, "load", load)
        yield


@contextlib.contextmanager
def quick_builds() -> Iterator[None]:
    """Within it, the backend "eager" builds without workers, and each kind once for all tests."""
    slow = Builder.build

    def build(
        builder: Builder,
        kinds: Sequence[BlockKind],
        listen: ProgressListener | None = None,
        **how: Any,
    ) -> None:
        replaced = {"build_in", "new_worker"} & vars(builder).keys()  # a test is about these
        if builder.backend.name != "eager" or replaced:
            slow(builder, kinds, listen, **how)
            return
        for done, kind in enumerate(kinds, 1):
            if kind.key.digest not in _BUILT:
                _BUILT[kind.key.digest] = kind.export()
            payload = _BUILT[kind.key.digest]
            builder.keep(kind, payload, 0.0)
            kind.accept(builder.load(payload, kind), "built")
            if listen is not None:
                listen(BuildProgress(done, len(kinds), kind.label, 0.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Builder, "build", build)
        yield
