"""Graphs of the backend "eager" are built and loaded once for all tests."""

from tests.support.shared_store import quick_eager_graphs

__all__ = ["quick_eager_graphs"]
