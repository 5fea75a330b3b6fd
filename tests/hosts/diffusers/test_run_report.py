"""What a run's report measures itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from onediff_ext.hosts.diffusers.jobs.run_report import peak_bytes


def test_peak_memory_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no module `resource`; psutil reads the peak there, and nowhere else."""
    peak = SimpleNamespace(rss=1 << 20, peak_wset=3 << 20)
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda process: peak)
    assert peak_bytes(torch.device("cpu")) == 3 << 20
