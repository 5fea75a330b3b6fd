"""Sessions with one store for the whole run."""

from tests.support.shared_store import quick_eager_graphs, run_store

__all__ = ["quick_eager_graphs", "run_store"]
