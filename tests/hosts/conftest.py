"""Sessions with one store for the whole run."""

from tests.support.shared_store import (
    compiling_worker,
    make_session,
    quick_eager_graphs,
    run_store,
    shared_store,
)
from tests.support.shared_tokenizers import one_tokenizer

__all__ = [
    "compiling_worker",
    "make_session",
    "one_tokenizer",
    "quick_eager_graphs",
    "run_store",
    "shared_store",
]
