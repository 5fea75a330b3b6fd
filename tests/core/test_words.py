"""Texts for people."""

from __future__ import annotations

import pytest

from onediff_ext.core.words import counted, first_line, printable, without_passwords


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo", "one"),
        ("\n \t\n  one  \r\ntwo", "one"),
        ("", "no message"),
        (" \n ", "no message"),
    ],
)
def test_the_first_line_with_text(text: str, line: str) -> None:
    assert first_line(text) == line


def test_an_empty_message_is_replaced() -> None:
    assert first_line("", "ValueError") == "ValueError"


def test_one_and_several() -> None:
    assert (counted(1, "graph"), counted(2, "graph")) == ("1 graph", "2 graphs")


def test_text_from_files_cannot_command_the_terminal() -> None:
    assert printable("a\tb\nc\x1b[2J\u202e\ud800é") == "a b c\\x1b[2J\\u202e\\ud800é"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ftp://me:se:cr@t@host/a b", "ftp://me:***@host/a b"),
        (
            "in sftp://me:secret@host:22/x, s3+x://k:s@b/",
            "in sftp://me:***@host:22/x, s3+x://k:***@b/",
        ),
        ('{"a": "ftp://me:secret@h/1", "b": "c@d"}', '{"a": "ftp://me:***@h/1", "b": "c@d"}'),
        ("http://host:80/a@b", "http://host:80/a@b"),
        ("ftp://me@host/a:b@c", "ftp://me@host/a:b@c"),
        ("C:/a@b", "C:/a@b"),
    ],
)
def test_a_password_in_a_url_is_not_shown(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
    assert printable(text) == shown
