"""Infotext in AUTOMATIC1111's format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.errors import OptionError
from onediff_ext.pictures.infotext import Infotext, build_infotext, parse_infotext

FIELDS = {
    "Steps": 20,
    "Sampler": "Euler a",
    "Schedule type": "Karras",
    "CFG scale": 7.0,
    "Seed": 1,
    "Size": "512x768",
    "Model hash": "6ce0161689",
    "Model": "v1-5-pruned, emaonly: fp16",
    "Denoising strength": 0.6,
    "Lora hashes": "detail: 47aaaf0d, light: 1b2c",
    "Clip skip": None,
    "Note": 'two\nlines "so"',
    "Version": "v1.10.1",
}

GOLDEN = (
    "a cat, (watercolour:1.2)\nby the sea <lora:detail:0.6>\n"
    "Negative prompt: blurry, ugly\nlow quality\n"
    "Steps: 20, Sampler: Euler a, Schedule type: Karras, CFG scale: 7.0, Seed: 1, "
    "Size: 512x768, Model hash: 6ce0161689, "
    'Model: "v1-5-pruned, emaonly: fp16", Denoising strength: 0.6, '
    'Lora hashes: "detail: 47aaaf0d, light: 1b2c", Note: "two\\nlines \\"so\\"", '
    "Version: v1.10.1"
)

PROMPT = "a cat, (watercolour:1.2)\nby the sea <lora:detail:0.6>"
NEGATIVE = "blurry, ugly\nlow quality"

# As the WebUI wrote them.
FROM_WEBUI = (
    "masterpiece\n"
    "Negative prompt: bad: hands, worst\n"
    "Steps: 30, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 5.5, Seed: 42, "
    "Size: 1024x1024, Model hash: 31e35c80fc, Model: sd_xl_base_1.0, "
    'ControlNet 0: "Module: canny, Model: x [a b], Weight: 1.0", '
    'TI hashes: "easynegative: c74b4e810b03", Hires upscale: 2, Version: v1.9.4'
)


def test_golden_text() -> None:
    assert build_infotext(PROMPT, NEGATIVE, FIELDS) == GOLDEN


def test_golden_text_reads_back() -> None:
    fields = {name: str(value) for name, value in FIELDS.items() if value is not None}
    assert parse_infotext(GOLDEN) == Infotext(PROMPT, NEGATIVE, fields)


def test_the_webuis_own_text_is_read() -> None:
    read = parse_infotext(FROM_WEBUI)
    assert read.prompt == "masterpiece"
    assert read.negative_prompt == "bad: hands, worst"
    assert read.fields["Sampler"] == "DPM++ 2M"
    assert read.fields["ControlNet 0"] == "Module: canny, Model: x [a b], Weight: 1.0"
    assert read.fields["TI hashes"] == "easynegative: c74b4e810b03"
    assert read.fields["Version"] == "v1.9.4"
    assert len(read.fields) == 12


def test_without_fields_all_is_prompt() -> None:
    assert parse_infotext("a cat: a dog, so: nice") == Infotext("a cat: a dog, so: nice")
    assert parse_infotext("") == Infotext()


def test_without_prompts_there_are_fields_only() -> None:
    assert build_infotext("", "", {"Steps": 1, "Seed": 2}) == "Steps: 1, Seed: 2"
    assert parse_infotext("Steps: 1, Seed: 2").fields == {"Steps": "1", "Seed": "2"}


@pytest.mark.parametrize("name", ["A", "a,b", "a:b", "a\nb", " ab", "ab ", "", "é(x)"])
def test_a_field_name_that_would_not_read_back_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="name of an infotext field"):
        build_infotext("", "", {name: 1})


def test_broken_quotes_are_kept_as_they_stand() -> None:
    read = parse_infotext('a\nSteps: 1, Seed: 2, Model: "a\\qb", Size: 8x8')
    assert read.fields["Model"] == '"a\\qb"'


LINE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=40)
PROMPTS = (
    st.lists(LINE.map(str.strip), max_size=3)
    .map("\n".join)
    .map(str.strip)
    .filter(lambda text: not any(line.startswith("Negative prompt:") for line in text.split("\n")))
)
NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9 /-]{0,20}[A-Za-z0-9]", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(PROMPTS, PROMPTS, st.dictionaries(NAMES.filter(lambda n: n != "Steps"), VALUES, max_size=5))
def test_what_is_written_reads_back(prompt: str, negative: str, fields: dict[str, str]) -> None:
    all_fields = {"Steps": "20", **fields}
    text = build_infotext(prompt, negative, all_fields)
    assert parse_infotext(text) == Infotext(prompt, negative, all_fields)


@given(st.text(max_size=300))
def test_any_text_can_be_read(text: str) -> None:
    parse_infotext(text)


def test_a_long_prompt_is_read_quickly() -> None:
    assert parse_infotext("word " * 20_000).prompt.startswith("word word")


def test_a_line_with_space_before_it_starts_the_negative_prompt() -> None:
    assert parse_infotext("a cat\n  Negative prompt: blurry") == Infotext("a cat", "blurry")


def test_a_negative_prompt_is_written_as_it_is_read() -> None:
    negative = "Negative prompt: ugly\nNegative prompt: Negative prompt: bad\nNegative prompt:"
    text = build_infotext("a cat", negative)
    assert text == "a cat\nNegative prompt: Negative prompt: ugly\nbad"
    read = parse_infotext(text)
    assert read.negative_prompt == "Negative prompt: ugly\nbad"


@pytest.mark.parametrize("prompts", [("{}", ""), ("a cat", "{}"), ("a cat\n{}", "bad\n{}")])
def test_a_prompt_that_looks_like_fields_stays_a_prompt(prompts: tuple[str, str]) -> None:
    given = tuple(text.format("Steps: 2, ab: 1, cd: 2") for text in prompts)
    assert parse_infotext(build_infotext(*given)) == Infotext(*given)
