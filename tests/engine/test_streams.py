"""GPU work of several streams that shares memory runs in order. Streams and events are fakes."""

from __future__ import annotations

import pytest
import torch

from onediff_ext.engine.streams import StreamOrder

GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """Keeps the streams that it waited for."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None
        self.waited.append(event.stream)


class Event:
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The one stream in it is the current one."""
    current = [Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return current


def test_a_piece_waits_for_the_last_one_of_another_stream(current: list[Stream]) -> None:
    order, first, second = StreamOrder(), current[0], Stream()
    for stream in (first, first, second, second, first):
        current[0] = stream
        with order.after_the_last(GPU):
            pass
    assert first.waited == [second]
    assert second.waited == [first]


def test_a_piece_that_failed_is_waited_for(current: list[Stream]) -> None:
    order, first, second = StreamOrder(), current[0], Stream()
    with pytest.raises(RuntimeError), order.after_the_last(GPU):
        raise RuntimeError("after some launches")
    order.wait(GPU, second)  # type: ignore[arg-type]
    assert second.waited == [first]


def test_devices_do_not_wait_for_each_other(current: list[Stream]) -> None:
    order, second = StreamOrder(), Stream()
    with order.after_the_last(GPU), order.after_the_last(torch.device("cpu")):
        pass
    order.wait(OTHER_GPU, second)  # type: ignore[arg-type]
    assert second.waited == []
