"""X/Y/Z axes, on a stand-in for the host's script."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.core.errors import OptionError
from onediff_ext.panel.choices import Choices
from onediff_ext.webui.xyz import AXES, add_axes, axis_values, remove_axes
from tests.support.webui_stand_in import StandInJob


class StandInAxis:
    """`AxisOption`."""

    def __init__(
        self, label: str, type: Any, apply: Any, confirm: Any = None, choices: Any = None
    ) -> None:
        self.label, self.type, self.apply, self.choices = label, type, apply, choices
        self.confirm = confirm


def grid() -> SimpleNamespace:
    return SimpleNamespace(AxisOption=StandInAxis, axis_options=[StandInAxis("Seed", int, None)])


def test_axes_are_added_once_and_taken_out_again() -> None:
    found = grid()
    before = list(found.axis_options)
    add_axes(found)
    add_axes(found)
    assert len(found.axis_options) == 1 + len(AXES)
    remove_axes(found)
    assert found.axis_options == before


def test_every_value_of_every_axis_can_be_used() -> None:
    found = grid()
    add_axes(found)
    for option in found.axis_options[1:]:
        values = option.choices()
        assert values
        for value in values:
            p = StandInJob()
            option.apply(p, option.type(value), values)
            name = next(n for n in axis_values(p) if n != "preset" or "Preset" in option.label)
            chosen = Choices.parse({**axis_values(p)})
            assert str(getattr(chosen, name)) == value


def test_deepcache_takes_a_text_of_ones_own() -> None:
    found = grid()
    add_axes(found)
    axis = next(option for option in found.axis_options if "DeepCache" in option.label)
    p = StandInJob()
    axis.apply(p, axis.type("4 depth=1"), [])
    chosen = Choices.parse({"preset": "Maximum", **axis_values(p)})
    assert (chosen.preset, chosen.deepcache) == ("Custom", "4 depth=1")


def test_two_axes_add_up_and_copies_of_the_job_are_independent() -> None:
    found = grid()
    add_axes(found)
    by_label = {option.label: option for option in found.axis_options}
    p = StandInJob()
    copies = [copy.copy(p), copy.copy(p)]
    by_label["[OneDiff] Enabled"].apply(copies[0], "True", [])
    by_label["[OneDiff] VAE"].apply(copies[0], "ignore all", [])
    by_label["[OneDiff] Enabled"].apply(copies[1], "False", [])
    first, second = (Choices.parse(axis_values(one)) for one in copies)
    assert (first.enabled, first.vae) == (True, "ignore all")
    assert (second.enabled, axis_values(p)) == (False, {})


def test_an_axis_turns_onediff_on_unless_the_axis_enabled_says_otherwise() -> None:
    found = grid()
    add_axes(found)
    by_label = {option.label: option for option in found.axis_options}
    for order in (["Preset", "Enabled"], ["Enabled", "Preset"]):
        p = StandInJob()
        by_label["[OneDiff] Preset"].apply(p, "Fast", [])
        assert Choices.parse({"enabled": False, **axis_values(p)}).enabled
        p = StandInJob()
        for name in order:
            by_label[f"[OneDiff] {name}"].apply(p, {"Preset": "Fast", "Enabled": "False"}[name], [])
        assert not Choices.parse(axis_values(p)).enabled


@pytest.mark.parametrize(
    ("label", "value", "hint"),
    [
        ("Enabled", "maybe", "true or false"),
        ("Preset", "Maximun", '"Maximum"'),
        ("Backend", "inducter", '"inductor"'),
        ("VAE", "ignore", "ignore all"),
        ("DeepCache", "warp 9", "light"),
        ("Precision", "fp9", '"fp8"'),
        ("Guidance steps", "0.6", "interval:0-0.6"),
    ],
)
def test_a_value_that_cannot_be_used_ends_the_grid_before_its_first_picture(
    label: str, value: str, hint: str
) -> None:
    found = grid()
    add_axes(found)
    axis = next(option for option in found.axis_options if option.label == f"[OneDiff] {label}")
    for known in axis.choices():
        axis.confirm(StandInJob(), [known])
    with pytest.raises(OptionError) as refused:
        axis.confirm(StandInJob(), [*axis.choices(), value])
    assert hint in refused.value.hint
