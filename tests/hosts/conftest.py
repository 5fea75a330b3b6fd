"""Sessions with one store for the whole run."""

from tests.support.shared_store import *  # noqa: F403  (its fixtures)
from tests.support.shared_tokenizers import one_tokenizer  # noqa: F401  (a fixture)
