"""The table of choices: in step with everything that is made from it, and tolerant of callers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.panel.choices import Choices, from_arguments, from_infotext
from onediff_ext.panel.field_schema import schema
from onediff_ext.panel.fields import (
    BY_NAME,
    CHECKBOX,
    CHECKBOXES,
    CUSTOM,
    FEATURES,
    FIELDS,
    PRESETS,
)


def test_the_table_and_the_dataclass_have_the_same_entries_and_defaults() -> None:
    found = [(f.name, f.default) for f in dataclasses.fields(Choices)]
    assert found == [(f.name, f.default) for f in FIELDS]


def test_names_labels_and_infotext_entries_are_distinct() -> None:
    for values in (
        [f.name for f in FIELDS],
        [f.label for f in FIELDS],
        [f.infotext for f in FIELDS if f.infotext],
    ):
        assert len(values) == len(set(values))


def test_every_default_is_one_of_its_choices() -> None:
    for field in FIELDS:
        if field.choices:
            defaults = field.default if isinstance(field.default, tuple) else (field.default,)
            assert set(defaults) <= set(field.choices), field.name


def test_presets_name_only_what_presets_decide_and_only_known_values() -> None:
    for preset, values in PRESETS.items():
        for name, value in values.items():
            assert BY_NAME[name].preset, (preset, name)
            assert value in BY_NAME[name].choices or BY_NAME[name].form == CHECKBOX


def test_the_schema_has_every_field_in_plain_values() -> None:
    described = schema(FEATURES)
    assert [one["name"] for one in described["fields"]] == [f.name for f in FIELDS]
    assert set(described["presets"]) == set(PRESETS)
    assert described["fields"][2]["default"] == ["UNet", "VAE", "ControlNet"]


def test_a_host_without_deepcache_offers_no_preset_that_needs_it() -> None:
    described = schema()
    assert "deepcache" not in [one["name"] for one in described["fields"]]
    assert set(described["presets"]) == {"Balanced", CUSTOM}
    Choices.parse({"preset": "Balanced"}).check_features(frozenset())
    fast = Choices.parse({"preset": "Fast"})
    assert fast.deepcache == "light"
    fast.check_features(FEATURES)
    with pytest.raises(OptionError, match="DeepCache"):
        fast.check_features(frozenset())


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
    entries = choices.infotext()
    assert entries.get("OneDiff DeepCache", "off") == text
    assert from_infotext(BY_NAME["deepcache"], entries) == text


@pytest.mark.parametrize("value", ["turbo", "0.5", -1, "3 colour=red", {"speed": 3}])
def test_what_is_no_deepcache_setting_is_refused(value: object) -> None:
    with pytest.raises(OptionError):
        Choices.parse({"preset": CUSTOM, "deepcache": value})


def test_an_infotext_with_an_unheard_of_deepcache_reads_as_off() -> None:
    entries = {"OneDiff": "on", "OneDiff preset": CUSTOM, "OneDiff DeepCache": "warp 9"}
    assert from_infotext(BY_NAME["deepcache"], entries) == "off"


def test_what_a_host_may_lack_comes_last_so_that_positions_hold() -> None:
    lacking = [bool(field.feature) for field in FIELDS]
    assert lacking == sorted(lacking)


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
    entries = choices.infotext()
    read = {f.name: from_infotext(f, entries) for f in FIELDS if f.infotext}
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
    )
    assert set(everything.infotext()) == {f.infotext for f in FIELDS if f.infotext}


def test_infotext_without_onediff_changes_nothing() -> None:
    assert all(from_infotext(f, {"Steps": "20"}) is None for f in FIELDS)
    assert Choices().infotext() == {}


def test_an_entry_from_another_version_is_read_as_the_default() -> None:
    entries = {"OneDiff": "on", "OneDiff preset": "Turbo", "OneDiff backend": "nexfort"}
    assert from_infotext(BY_NAME["backend"], entries) == BY_NAME["backend"].default
    assert from_infotext(BY_NAME["preset"], entries) == BY_NAME["preset"].default


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {}),
        ((True,), {"enabled": True}),
        ((True, "Custom", ["UNet"]), {"enabled": True, "preset": "Custom", "components": ["UNet"]}),
        ((None, "Balanced"), {"preset": "Balanced"}),
        (({},), {"enabled": True}),
        (({"vae": "ignore all"}, "Balanced", "more"), {
            "enabled": True, "preset": "Custom", "vae": "ignore all",
        }),
        (({"enabled": False, "unheard": 1},), {"enabled": False, "unheard": 1}),
        ((*[None] * len(FIELDS), "one too many"), {}),
    ],
)  # fmt: skip
def test_arguments_by_position_or_as_a_dict(arguments: tuple, expected: dict) -> None:
    assert from_arguments(arguments) == expected
    Choices.parse(from_arguments(arguments))


def test_a_preset_decides_what_presets_decide() -> None:
    given = {"vae": "ignore all", "components": ["UNet"], "captures": False}
    assert Choices.parse({**given, "preset": "Balanced"}).vae == "compile"
    custom = Choices.parse({**given, "preset": "custom"})
    assert (custom.vae, custom.components, custom.captures) == ("ignore all", ("UNet",), False)


def test_texts_stand_for_values_as_other_programs_send_them() -> None:
    chosen = Choices.parse({"enabled": "True", "preset": CUSTOM, "components": "unet+VAE"})
    assert (chosen.enabled, chosen.components) == (True, ("UNet", "VAE"))
    assert not Choices.parse({"enabled": "False"}).enabled


@pytest.mark.parametrize(
    "wrong",
    [
        {"preset": "Turbo"},
        {"preset": CUSTOM, "vae": "sideways"},
        {"preset": CUSTOM, "components": ["UNet", "Brain"]},
        {"sizes": "huge"},
        {"sizes": "513x512"},
        {"size_box": "512"},
        {"size_box": "512x512 - 64x64"},
        {"batch_range": "some"},
        {"batch_range": "4 - 1"},
    ],
)
def test_what_cannot_be_used_is_refused_with_a_hint(wrong: dict) -> None:
    with pytest.raises(OneDiffError) as refused:
        Choices.parse(wrong)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("values", "ignored"),
    [
        ({}, set()),
        ({"vae": "ignore encoder"}, {"vae_encoder"}),
        ({"vae": "ignore all"}, {"vae", "vae_encoder", "vae_decoder"}),
        ({"components": ["UNet"]}, {"vae", "vae_encoder", "vae_decoder", "controlnet"}),
        ({"components": ["VAE", "ControlNet"]}, {"unet"}),
    ],
)
def test_components_to_leave_alone(values: dict, ignored: set[str]) -> None:
    assert Choices.parse({"preset": CUSTOM, **values}).ignores == ignored


def test_size_box_and_batch_range_say_what_is_outside() -> None:
    chosen = Choices.parse({"size_box": "256x256 - 1024x1536", "batch_range": "1 - 2"})
    assert chosen.outside(1024, 1536, 2) is None
    assert "1032x512" in chosen.outside(1032, 512, 1)
    assert "size box" in chosen.outside(512, 1544, 1)
    assert "3 at once" in chosen.outside(512, 512, 3)
    assert Choices().outside(64, 4096, 64) is None


def test_options_carry_backend_and_store(tmp_path) -> None:
    chosen = Choices.parse({"preset": CUSTOM, "backend": "eager"})
    options = chosen.compile_options(store=tmp_path, store_limit_bytes=1000, build="never")
    assert (options.backend, options.store, options.store_limit_bytes, options.build) == (
        "eager", tmp_path, 1000, "never",
    )  # fmt: skip
    with pytest.raises(OptionError):
        chosen.compile_options(build="sometimes")
