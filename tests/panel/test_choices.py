"""The table of choices and its values: in step with each other, and tolerant of callers."""

from __future__ import annotations

import dataclasses

import pytest

from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.panel.choices import Choices, from_arguments
from onediff_ext.panel.field_schema import schema
from onediff_ext.panel.fields import FEATURES, FIELDS
from onediff_ext.panel.presets import CUSTOM, PRESETS


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


def test_the_schema_has_every_field_in_plain_values() -> None:
    described = schema(FEATURES)
    assert [one["name"] for one in described["fields"]] == [f.name for f in FIELDS]
    assert set(described["presets"]) == set(PRESETS)
    assert described["fields"][2]["default"] == ["UNet", "VAE", "ControlNet"]


@pytest.mark.parametrize("value", ["turbo", "0.5", -1, "3 colour=red", {"speed": 3}])
def test_what_is_no_deepcache_setting_is_refused(value: object) -> None:
    with pytest.raises(OptionError):
        Choices.parse({"preset": CUSTOM, "deepcache": value})


def test_what_a_host_may_lack_comes_last_so_that_positions_hold() -> None:
    lacking = [bool(field.feature) for field in FIELDS]
    assert lacking == sorted(lacking)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {}),
        ((True,), {"enabled": True}),
        # The page has a control of its own for the VAE.
        ((True, "Custom", ["UNet"]), {
            "enabled": True, "preset": "Custom", "components": ["UNet", "VAE"],
        }),
        ((True, "Custom", "UNet"), {"enabled": True, "preset": "Custom", "components": "UNet"}),
        ((True, *[None] * 3, ["512x768", "64x64@2"]), {
            "enabled": True, "sizes": "512x768, 64x64@2",
        }),
        ((None, "Balanced"), {"preset": "Balanced"}),
        (({},), {"enabled": True}),
        (({"vae": "ignore all"}, "Balanced", "UNet"), {
            "enabled": True, "preset": "Custom", "vae": "ignore all",
        }),
        (({"enabled": False, "captures": 1},), {
            "enabled": False, "preset": "Custom", "captures": 1,
        }),
        ((*[None] * len(FIELDS), "one too many"), {}),
    ],
)  # fmt: skip
def test_arguments_by_position_or_as_a_dict(arguments: tuple, expected: dict) -> None:
    assert from_arguments(arguments) == expected
    Choices.parse(from_arguments(arguments))


@pytest.mark.parametrize("first", [{"enabled": True}, {"preset": "Fast"}])
def test_what_stands_behind_a_dict_is_read(first: dict) -> None:
    with pytest.raises(OptionError, match="junk"):
        Choices.parse(from_arguments((first, "junk")))
    with pytest.raises(OptionError, match=r"Components.*junk"):
        Choices.parse(from_arguments((first, "Balanced", ["junk"])))


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
        {"enabled": "maybe"},
        {"enabled": 2},
        {"unheard": 1},
        {"captures": "perhaps"},
        {"size_box": True},
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
    assert chosen.outside_reason(1024, 1536, 2) is None
    assert "1032x512" in chosen.outside_reason(1032, 512, 1)
    assert "size box" in chosen.outside_reason(512, 1544, 1)
    assert "3 at once" in chosen.outside_reason(512, 512, 3)
    assert Choices().outside_reason(64, 4096, 64) is None


def test_options_carry_backend_and_store(tmp_path) -> None:
    chosen = Choices.parse({"preset": CUSTOM, "backend": "eager"})
    options = chosen.compile_options(store=tmp_path, store_limit_bytes=1000, build="never")
    assert (options.backend, options.store, options.store_limit_bytes, options.build) == (
        "eager", tmp_path, 1000, "never",
    )  # fmt: skip
    with pytest.raises(OptionError):
        chosen.compile_options(build="sometimes")


def test_a_picture_needs_nothing_but_its_switch_while_onediff_is_off() -> None:
    chosen, notes = Choices.for_picture({"enabled": False, "size_box": "huge", "sizes": "xx"})
    assert chosen == Choices()
    assert len(notes) == 2
    with pytest.raises(OptionError):
        Choices.for_picture({"enabled": True, "size_box": "huge"})
