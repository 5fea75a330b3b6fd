"""Choices as infotext entries, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field import CHECKBOX, CHECKBOXES
from onediff_ext.panel.fields import BY_NAME, FIELDS
from onediff_ext.panel.infotext_entries import infotext_entries, value_from_infotext
from onediff_ext.panel.presets import CUSTOM


@pytest.mark.parametrize(
    ("given_value", "text"),
    [
        ("Medium", "medium"), (3, "medium"), ("5", "strong"), (1, "off"), (False, "off"),
        ("4", "4"), ("3 depth=1", "3 depth=1"), ({"interval": 4, "end": 0.8}, "4 end=0.8"),
    ],
)  # fmt: skip
def test_deepcache_is_a_level_or_a_text_of_ones_own(given_value: object, text: str) -> None:
    choices = Choices.parse({"enabled": True, "preset": CUSTOM, "deepcache": given_value})
    assert choices.deepcache == text
    entries = infotext_entries(choices)
    assert entries.get("OneDiff DeepCache", "off") == text
    assert value_from_infotext(BY_NAME["deepcache"], entries) == text


def test_an_infotext_with_an_unheard_of_deepcache_reads_as_off() -> None:
    entries = {"OneDiff": "on", "OneDiff preset": CUSTOM, "OneDiff DeepCache": "warp 9"}
    assert value_from_infotext(BY_NAME["deepcache"], entries) == "off"


def _values(field):
    if field.form == CHECKBOX:
        return st.booleans()
    if field.form == CHECKBOXES:
        return st.lists(st.sampled_from(field.choices), unique=True)
    if field.choices:
        return st.sampled_from(field.choices)
    texts = {
        "sizes": ["", "512x768", "512x768, 1024x1024@2"],
        "size_box": ["", "64x64 - 2048x2048"],
        "batch_range": ["", "1 - 4", "2"],
    }
    return st.sampled_from(texts[field.name])


@given(st.fixed_dictionaries({f.name: _values(f) for f in FIELDS}))
def test_what_is_written_into_infotext_comes_back(values: dict) -> None:
    choices = Choices.parse({**values, "enabled": True})
    entries = infotext_entries(choices)
    read = {f.name: value_from_infotext(f, entries) for f in FIELDS if f.infotext}
    back = Choices.parse({**read, "sizes": choices.sizes})
    # An empty list of components is written as an empty entry, which hosts drop.
    assert back == choices


def test_each_entry_belongs_to_a_field_of_the_table() -> None:
    everything = Choices(
        enabled=True,
        preset=CUSTOM,
        components=("UNet",),
        vae="ignore all",
        backend="eager",
        captures=False,
        size_box="64x64 - 512x512",
        batch_range="1",
        on_failure="stop",
        precision="fp8",
        deepcache="light",
        guidance_steps="interval:0-0.6",
    )
    assert set(infotext_entries(everything)) == {f.infotext for f in FIELDS if f.infotext}


def test_infotext_without_onediff_changes_nothing() -> None:
    assert all(value_from_infotext(f, {"Steps": "20"}) is None for f in FIELDS)
    assert infotext_entries(Choices()) == {}


def test_an_entry_from_another_version_is_read_as_the_default() -> None:
    entries = {"OneDiff": "on", "OneDiff preset": "Turbo", "OneDiff backend": "nexfort"}
    assert value_from_infotext(BY_NAME["backend"], entries) == BY_NAME["backend"].default
    assert value_from_infotext(BY_NAME["preset"], entries) == BY_NAME["preset"].default
