"""One tokenizer for all checkpoints that tests load: reading its file takes a tenth of a second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from onediff_ext.hosts.diffusers.checkpoints import ldm_checkpoint
from tests.support import models


@contextlib.contextmanager
def shared_tokenizers() -> Iterator[None]:
    """Within the block, checkpoints get the tokenizers of `tests.support.models`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ldm_checkpoint, "make_tokenizer", models.tokenizer)
        yield


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer() -> Iterator[None]:
    """`shared_tokenizers` for all tests of a folder whose conftest imports this."""
    with shared_tokenizers():
        yield
