"""Names of results."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.errors import OptionError
from onediff_ext.pictures.naming import NameFacts, NameTemplate, distinct_names, free_path, numbered


def facts(path: str = "in/cat.v2.jpg") -> NameFacts:
    return NameFacts(Path(path), 7, 123, 640, 448, datetime.date(2024, 12, 31))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{stem}.png", "cat.v2.png"),
        ("{stem}", "cat.v2.png"),
        ("{name}", "cat.v2.jpg.png"),
        ("{index:04d}-{seed}.PNG", "0007-123.png"),
        ("{date}/{stem}-{width}x{height}", "2024-12-31/cat.v2-640x448.png"),
        ("{date}\\{stem}", "2024-12-31/cat.v2.png"),
        ("./a b{{x}}.png", "a b{x}.png"),
    ],
)
def test_templates(template: str, name: str) -> None:
    assert NameTemplate(template).render(facts()) == name


@pytest.mark.parametrize(
    "template",
    [
        *["{step}", "{}", "{0}", "{stem", "stem}", "{stem.__class__}", "{stem[0]}"],
        *["{stem:04d}", "{index:%Y}", "{seed:{width}q}"],
    ],
)
def test_a_bad_template_lists_the_fields(template: str) -> None:
    with pytest.raises(OptionError, match=r"\{stem\}, \{name\}, \{index\}"):
        NameTemplate(template)


@pytest.mark.parametrize(
    "template", ["", "../{stem}", "a/../../{stem}", "/tmp/{stem}", "C:/a", "\\a"]
)
def test_a_template_does_not_leave_the_folder(template: str) -> None:
    with pytest.raises(OptionError, match="output folder"):
        NameTemplate(template)


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ('a<b>:"c|?*', "a_b___c___.png"),
        ("a\nb\\c", "a_b_c.png"),
        ("con", "_con.png"),
        ("LPT1.x", "_LPT1.x.png"),
        ("aux .x", "_aux .x.png"),
        ("com\u00b9", "_com\u00b9.png"),
        ("CONOUT$", "_CONOUT$.png"),
        ("console", "console.png"),
        ("end. ", "end.png"),
        ("..", "_.png"),
        ("caf\u0065\u0301", "caf\u00e9.png"),
        ("\udcff", "_.png"),
    ],
)
def test_unsafe_names_are_made_safe(stem: str, name: str) -> None:
    assert NameTemplate().render(facts(f"{stem}.jpg")) == name


def test_a_long_name_is_cut_between_letters() -> None:
    name = NameTemplate().render(facts("é" * 300 + ".jpg"))
    assert name == "é" * 100 + ".png"


@given(st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=80))
def test_any_stem_gives_one_usable_name(stem: str) -> None:
    name = NameTemplate("{stem}").render(facts(f"in/{stem}x.jpg"))
    assert "/" not in name
    assert name not in (".png", "..png")
    assert not name.startswith(".")
    assert len(name.encode()) <= 220


def test_equal_names_are_numbered_in_input_order() -> None:
    assert distinct_names(["a.png", "b.png", "A.png", "a-2.png", "d/a.png", "a.png"]) == (
        ["a.png", "b.png", "A-3.png", "a-2.png", "d/a.png", "a-4.png"]
    )


@given(st.lists(st.sampled_from(["a.png", "A.png", "a-2.png", "a-2-2.png", "b.png"]), max_size=12))
def test_names_are_always_distinct(names: list[str]) -> None:
    distinct = distinct_names(names)
    assert len({name.casefold() for name in distinct}) == len(names)
    assert distinct == distinct_names(names)
    assert distinct[:1] == names[:1]


def test_numbers_stand_before_the_ending() -> None:
    assert numbered("x/a.b.png", 3) == "x/a.b-3.png"


def test_a_path_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.b.png"
    assert free_path(path) == path
    path.touch()
    (tmp_path / "a.b-2.png").touch()
    assert free_path(path) == tmp_path / "a.b-3.png"
