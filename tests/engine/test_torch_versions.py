"""Workarounds for torch."""

from __future__ import annotations

import threading

import pytest
import torch

from onediff_ext.engine.torch_versions import keep_device_guard


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_device_guard_belongs_to_a_thread_that_stays(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    asked: list[threading.Thread] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(
        torch._C,
        "_ensureCUDADeviceGuardSet",
        lambda: asked.append(threading.current_thread()),
        raising=False,
    )
    keep_device_guard.__wrapped__()
    assert len(asked) == (0 if has_gpu else 1)
    assert all(thread.is_alive() and thread.daemon for thread in asked)
    assert threading.current_thread() not in asked
