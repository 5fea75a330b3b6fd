"""A stand-in for the host; graphs of the backend "eager" are built once for all tests."""

from tests.support.shared_store import quick_eager_graphs
from tests.support.webui_fixtures import host

__all__ = ["host", "quick_eager_graphs"]
