"""Sessions with one store for the whole run."""

from tests.support.shared_store import *  # noqa: F403  (its fixtures)
