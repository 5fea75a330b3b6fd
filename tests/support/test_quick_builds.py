"""Loaded graphs of tests are spared by later garbage collections, garbage is not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.support import quick_builds


class Cycle:
    """Only a garbage collection frees it."""

    def __init__(self) -> None:
        self.me = self


def test_a_new_graph_is_frozen_once_and_no_garbage_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = [object() for _ in range(10)]
    monkeypatch.setattr(quick_builds, "_LOADED", {(b"", torch.device("cpu")): graph})
    monkeypatch.setattr(quick_builds, "_frozen", 0)
    garbage = weakref.ref(Cycle())
    quick_builds.freeze_loaded()
    assert garbage() is None
    assert not any(each is graph for each in gc.get_objects())
    gc.disable()
    try:
        later = weakref.ref(Cycle())
        quick_builds.freeze_loaded()
        assert later() is not None
    finally:
        gc.enable()
    gc.collect()
    assert later() is None
