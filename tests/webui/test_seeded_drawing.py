"""Jobs of a folder draw the same whatever was drawn before, or is drawn beside them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch


class Job:
    """The host's processing object.

    Args:
        seed: Of its picture.
    """

    def __init__(self, seed: int) -> None:
        self.seed = [seed]
        self.noise = torch.empty(0)

    def init(self) -> None:
        self.noise = torch.randn(4)


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], torch.Tensor]]:
    """Draw a job of a seed; returns its noise."""
    host = ModuleType("modules")
    vars(host)["processing"] = SimpleNamespace(process_images=lambda p: p.init())
    monkeypatch.setitem(sys.modules, "modules", host)
    monkeypatch.delitem(sys.modules, "onediff_ext.webui.seeded_drawing", raising=False)
    from onediff_ext.webui.seeded_drawing import draw_seeded

    def drawn(seed: int) -> torch.Tensor:
        job = Job(seed)
        draw_seeded(job)
        assert "init" not in vars(job)
        return job.noise

    yield drawn
    sys.modules.pop("onediff_ext.webui.seeded_drawing", None)


def test_what_was_drawn_before_does_not_count(draw: Callable[[int], torch.Tensor]) -> None:
    first = draw(3)
    torch.randn(7)
    assert torch.equal(draw(3), first)
    assert not torch.equal(draw(4), first)


def test_a_job_waits_for_the_thread_that_loads_the_first_checkpoint(
    draw: Callable[[int], torch.Tensor],
) -> None:
    expected, goes_on, begun = draw(3), threading.Event(), threading.Event()

    def load_model() -> None:
        begun.set()
        goes_on.wait(10)
        torch.nn.Linear(1, 1)  # as the host's `first_time_calculation`

    loading = threading.Thread(target=load_model)
    loading.start()
    assert begun.wait(10)
    found: list[torch.Tensor] = []
    drawing = threading.Thread(target=lambda: found.append(draw(3)))
    drawing.start()
    drawing.join(0.3)
    assert not found
    goes_on.set()
    drawing.join(10)
    assert torch.equal(found[0], expected)
    loading.join()
