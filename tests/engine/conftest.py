"""Sessions with one store for the whole run."""

from tests.support.shared_store import (
    compiling_worker,
    make_session,
    quick_eager_graphs,
    run_store,
    shared_store,
)

__all__ = ["compiling_worker", "make_session", "quick_eager_graphs", "run_store", "shared_store"]
