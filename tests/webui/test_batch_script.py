"""The identity of a run of the batch script, and its access to folders, on a stand-in host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.core.errors import OneDiffError
from tests.support.webui_stand_in import StandInJob


@pytest.fixture
def run(host: Any) -> Any:
    """Runs the script on a stand-in job; for the page, or for a client of the API."""
    from onediff_ext.webui.batch_script import BatchScript

    def run(*arguments: Any, is_api: bool) -> Any:
        p: Any = StandInJob()
        p.is_api = is_api
        return BatchScript().run(p, *arguments)

    host.processing.fix_seed = lambda p: None
    host.processing.Processed = lambda p, images, seed, info, **_: SimpleNamespace(info=info)
    host.processing.process_images = None  # nothing gets so far
    host.sd_models.select_checkpoint = lambda: None
    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("/nowhere", "/tmp/out"), "/nowhere"),
        ((), "No input folder"),
        (("", "/tmp/out"), "No input folder"),
        (("/nowhere", "/tmp/out", "sideways"), "sideways"),
        (("/nowhere", "/tmp/out", "own", 0), "Use 1 to 64"),
        (("/nowhere", "/tmp/out", "own", "many"), "Use a whole number"),
        (("/nowhere", "/tmp/out", "own", 4, "maybe"), "true or false"),
        (("/nowhere", "/tmp/out", "own", 4, *[False] * 4, "{colour}"), "{colour}"),
        (("/nowhere", "/tmp/out", "own", 4, *[False] * 4, "{stem}", "1", 1), "10 arguments"),
        (("/nowhere", "/tmp/out", "own", 4, *[False] * 4, "{stem}", "two"), "no number of GPUs"),
        (({"input": "/nowhere", "outputt": "/tmp/out"},), 'Did you mean "output"?'),
        (({"input": "/nowhere", "output": "/tmp/out"}, "of another script"), "/nowhere"),
    ],
)
def test_a_job_that_cannot_run_is_an_error_for_the_api_and_a_message_on_the_page(
    run: Any, arguments: tuple[Any, ...], said: str
) -> None:
    assert said in run(*arguments, is_api=False).info
    with pytest.raises(OneDiffError) as refused:
        run(*arguments, is_api=True)
    assert said in str(refused.value)
    assert said in vars(refused.value)["detail"]
    assert vars(refused.value)["status_code"] == 422


def test_a_folder_of_broken_pictures_is_an_error_for_the_api(run: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "broken.png").write_bytes(b"nothing")
    with pytest.raises(OneDiffError, match=r"broken\.png"):
        run(str(tmp_path / "in"), str(tmp_path / "out"), is_api=True)
    with pytest.raises(OneDiffError, match=r"broken\.png"):  # as Explorer copies paths
        run(f'"{tmp_path / "in"}"', f' "{tmp_path / "out"}"', is_api=True)


def test_missing_arguments_are_the_defaults() -> None:
    from onediff_ext.webui.batch_arguments import FIELDS, read_arguments

    chosen = read_arguments(("in", None, "", 8.0))
    defaults = {field.name: field.default for field in FIELDS}
    assert chosen == {**defaults, "input": "in", "batch": 8}
    assert type(chosen["batch"]) is int


@dataclass
class StandInCheckpoint:
    name: str
    shorthash: str | None

    def calculate_shorthash(self) -> str | None:
        return self.shorthash


@pytest.mark.parametrize("loaded", [None, "abc", "def"])
def test_a_run_is_known_by_the_chosen_checkpoint(host: Any, loaded: str | None) -> None:
    """Forge loads it only when it draws; memory holds no checkpoint or the previous one."""
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
    script.run(job, "/", "/")
    assert "--hide-ui-dir-config" in seen[0]
