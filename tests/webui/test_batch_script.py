"""What the batch script asks its host before a run, on a stand-in host."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.webui_stand_in import StandInJob


@dataclass
class StandInCheckpoint:
    name: str
    shorthash: str | None

    def calculate_shorthash(self) -> str | None:
        return self.shorthash


@pytest.mark.parametrize("loaded", [None, "abc", "def"])
def test_a_run_is_known_by_the_chosen_checkpoint(host: Any, loaded: str | None) -> None:
    """Forge loads it only when it draws: in memory is nothing, or what was chosen before."""
    from onediff_ext.webui import batch_script

    host.shared.sd_model = SimpleNamespace()
    if loaded is not None:
        host.shared.sd_model.sd_checkpoint_info = StandInCheckpoint("loaded", loaded)
    host.sd_models.select_checkpoint = lambda: StandInCheckpoint("chosen.safetensors", "def")
    assert batch_script._identity(StandInJob())["checkpoint"] == "def"


def test_without_hashes_a_checkpoint_is_known_by_its_name(host: Any) -> None:
    from onediff_ext.webui import batch_script

    host.sd_models.select_checkpoint = lambda: StandInCheckpoint("chosen.safetensors", None)
    assert batch_script._identity(StandInJob())["checkpoint"] == "chosen.safetensors"


def test_another_vae_of_forge_is_another_run(host: Any) -> None:
    from onediff_ext.webui import batch_script

    host.sd_models.select_checkpoint = lambda: StandInCheckpoint("chosen.safetensors", "def")
    host.shared.opts.forge_additional_modules = []
    before = batch_script._identity(StandInJob())
    host.shared.opts.forge_additional_modules = ["vae.safetensors"]
    assert batch_script._identity(StandInJob()) != before


def test_the_hosts_flag_that_hides_folders_takes_the_script_away(host: Any) -> None:
    from onediff_ext.webui.batch_script import BatchScript

    script = BatchScript()
    assert script.show(True)
    host.shared.cmd_opts.hide_ui_dir_config = True
    assert not script.show(True)
    job = StandInJob()
    seen: list[str] = []
    host.processing.fix_seed = lambda p: None
    host.processing.Processed = lambda p, images, seed, info: seen.append(info) or SimpleNamespace()
    script.run(job, source="/", target="/")
    assert "--hide-ui-dir-config" in seen[0]
