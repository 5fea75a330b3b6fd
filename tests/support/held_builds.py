"""Builds that wait until a test releases them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from onediff_ext.building.builder import Builder
from onediff_ext.session.session import Session


@contextmanager
def builds_on_hold(session: Session) -> Iterator[None]:
    """Hold all builds of a session until the ``with`` block ends."""
    builder, released = session.builder, threading.Event()

    def build(*args: object, **kwargs: object) -> None:
        released.wait(60)
        Builder.build(builder, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "build", build)
        try:
            yield
        finally:
            released.set()
