"""Sessions with one store for the whole run."""

from tests.support.shared_store import make_session, quick_eager_graphs, shared_store

__all__ = ["make_session", "quick_eager_graphs", "shared_store"]
