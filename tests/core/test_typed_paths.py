"""Paths as people type or paste them."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_ext.core.typed_paths import typed_path


@pytest.mark.parametrize("form", ["{}", "  {}\n", '"{}"', "'{}'", ' "{} " '])
def test_a_pasted_path_is_understood(form: str, tmp_path: Path) -> None:
    """Explorer's "Copy as path" adds quotes, and a terminal adds single ones."""
    folder = tmp_path / "my pictures"
    assert typed_path(form.format(folder)) == folder


def test_quotes_that_belong_to_a_name_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("'quoted'").mkdir()
    assert typed_path("'quoted'") == Path("'quoted'")
    assert typed_path("'other'") == Path("other")
    assert typed_path('the "best"') == Path('the "best"')
    assert typed_path("\"mixed'") == Path("\"mixed'")


def test_a_tilde_is_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert typed_path('"~/pictures"') == tmp_path / "pictures"
    assert typed_path("~nobody-of-this-name/a") == Path("~nobody-of-this-name/a")


@pytest.mark.parametrize("text", [None, "", "  \n", '""', '"', "' '"])
def test_an_empty_field(text: str | None) -> None:
    assert typed_path(text) is None
