"""The settings page "OneDiff"."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_ext.core.options import CompileOptions
from onediff_ext.webui.settings import BUILDS, SECTION, SETTINGS, Settings, add_settings
from tests.support.webui_stand_in import StandInOption, StandInOptions


class StandInGradio:
    """The components' names; their values are never called."""

    Radio, Slider, Textbox = "radio", "slider", "textbox"


def test_every_setting_is_on_the_page_with_its_default() -> None:
    options = StandInOptions()
    add_settings(options, StandInOption, StandInGradio)
    assert {key: info.default for key, info in options.labels.items()} == {
        setting.key: setting.default for setting in SETTINGS
    }
    assert {info.section for info in options.labels.values()} == {SECTION}


def test_the_store_folder_is_out_of_reach_of_the_api_and_hidden_with_other_folders() -> None:
    options = StandInOptions()
    add_settings(options, StandInOption, StandInGradio, with_folders=False)
    assert options.labels["onediff_store"].arguments == {"visible": False}
    assert [key for key, info in options.labels.items() if info.restrict_api] == ["onediff_store"]


def test_adding_twice_keeps_what_the_user_chose() -> None:
    options = StandInOptions()
    add_settings(options, StandInOption, StandInGradio)
    for text in ("only by Build now", "only by Warm up now"):  # as version 0.2 had it
        assert Settings({"onediff_build": text}).build == "never"
    options.onediff_build = "only by Build now"
    add_settings(options, StandInOption, StandInGradio)
    assert Settings(options).build == "never"


def test_defaults_hold_where_the_host_has_nothing_or_nonsense() -> None:
    assert Settings({}).store is None
    assert Settings({}).store_limit_bytes == CompileOptions.store_limit_bytes
    assert Settings({"onediff_build": "tomorrow"}).build == BUILDS["in the background"]
    assert Settings({"onediff_backend": None}).get("onediff_backend") == "inductor"


@pytest.mark.parametrize("value", ["much", [], "inf", "nan", 1e308, float("nan")])
def test_a_limit_that_is_no_number_is_the_default(value: object) -> None:
    limit_bytes = Settings({"onediff_store_limit_gb": value}).store_limit_bytes
    assert limit_bytes == CompileOptions.store_limit_bytes


def test_a_home_folder_is_resolved() -> None:
    for text in (" ~/graphs ", '"~/graphs"'):
        assert Settings({"onediff_store": text}).store == Path.home() / "graphs"


def test_a_limit_of_nothing_is_at_least_a_byte() -> None:
    assert Settings({"onediff_store_limit_gb": 0}).store_limit_bytes == 1


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_keys_are_ours_and_defaults_are_choices(setting) -> None:
    assert setting.key.startswith("onediff_")
    assert not setting.choices or setting.default in setting.choices


def test_a_value_that_cannot_be_used_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings({"onediff_build": "tomorow", "onediff_infotext": "perhaps"})
    for _ in range(2):
        assert settings.build == "background"
        assert settings.get("onediff_infotext") is True
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "'tomorow' is unknown" in caplog.text
    assert "Use true or false" in caplog.text
