"""Exports are shared within a test run, and only there."""

from __future__ import annotations

import pytest

from onediff_ext.engine.blocks.block_kind import BlockKind
from tests.support.kept_exports import FOLDER_VARIABLE, kept_exports


@pytest.mark.parametrize("is_test_run", [True, False])
def test_only_a_test_run_keeps_exports(
    is_test_run: bool, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_test_run:
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    else:
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    before = BlockKind.__init__
    with kept_exports():
        assert (BlockKind.__init__ is not before) == is_test_run
    assert BlockKind.__init__ is before
