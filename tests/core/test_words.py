"""Texts for people."""

from __future__ import annotations

import pytest

from onediff_ext.core.words import counted, first_line, printable


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
