"""Builds that wait until a test lets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from onediff_ext.building.builder import Builder
from onediff_ext.session.session import Session


@contextmanager
def at_the_gate(session: Session) -> Iterator[None]:
    """No build of this session begins before the ``with`` block has ended."""
    builder, opened = session.builder, threading.Event()

    def build(*args: object, **kwargs: object) -> None:
        opened.wait(60)
        Builder.build(builder, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "build", build)
        try:
            yield
        finally:
            opened.set()
