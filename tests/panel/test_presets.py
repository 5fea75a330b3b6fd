"""The presets: what each one decides, and which ones a host offers."""

from __future__ import annotations

import pytest

from onediff_ext.core.errors import OptionError
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.field import CHECKBOX
from onediff_ext.panel.field_schema import schema
from onediff_ext.panel.fields import BY_NAME, FEATURES
from onediff_ext.panel.presets import CUSTOM, PRESETS


def test_presets_name_only_what_presets_decide_and_only_known_values() -> None:
    for preset, values in PRESETS.items():
        for name, value in values.items():
            assert BY_NAME[name].decided_by_preset, (preset, name)
            assert value in BY_NAME[name].choices or BY_NAME[name].form == CHECKBOX


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


def test_a_preset_decides_what_presets_decide() -> None:
    given = {"vae": "ignore all", "components": ["UNet"], "captures": False}
    assert Choices.parse({**given, "preset": "Balanced"}).vae == "compile"
    custom = Choices.parse({**given, "preset": "custom"})
    assert (custom.vae, custom.components, custom.captures) == ("ignore all", ("UNet",), False)
