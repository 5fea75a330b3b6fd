"""Sessions with one store for the whole run, and a recorder as strict as a GPU."""

import pytest

from tests.support.shared_store import *  # noqa: F403  (its fixtures)
from tests.support.shared_tokenizers import one_tokenizer  # noqa: F401  (a fixture)
from tests.support.strict_recorder import StrictRecorder


@pytest.fixture
def recorder() -> StrictRecorder:
    return StrictRecorder()
