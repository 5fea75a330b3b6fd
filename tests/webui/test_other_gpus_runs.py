"""A folder's run on other GPUs too, with a stand-in for each."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image, ImageOps

from onediff_ext.pictures.batch.batch_drawer import DrawerLostError
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.size_rules import OwnSize
from tests.support.host_of_another_gpu import SCRIPTS, script
from tests.support.other_gpus import command, job_of
from tests.support.sample_pictures import save_pictures
from tests.support.webui_stand_in import StandInState

ROOT = Path(__file__).parents[2]
NAMES = [f"p{number}" for number in range(6)]


@pytest.fixture
def run(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], tuple[Any, list[Any]]]:
    """Run a folder of six pictures on processes that draw in a way; returns the result, and the
    jobs of the host itself."""
    paths: Any = ModuleType("modules.paths_internal")
    paths.script_path = str(ROOT)
    monkeypatch.setitem(sys.modules, "modules.paths_internal", paths)
    host.shared.opts.data = {"sd_model_checkpoint": "b"}
    folder = save_pictures(tmp_path / "in", **dict.fromkeys(NAMES, (64, 64)))

    def run(way: str, further: int) -> tuple[Any, list[Any]]:
        from onediff_ext.webui.batch_job import run_batch_job
        from onediff_ext.webui.other_gpus import drawer

        monkeypatch.setattr(drawer, "host_command", lambda launcher: command(way))
        p = job_of(Image.new("RGB", (64, 64)), seed=3, prompt="a fox")
        p.scripts = SimpleNamespace(scripts=[script(*each) for each in SCRIPTS])
        drew, jobs = threading.Event(), []
        count = drawer.OtherGPUDrawer.on_written
        lose = drawer.OtherGPUDrawer.on_lost
        monkeypatch.setattr(drawer.OtherGPUDrawer, "on_written", lambda *a: (drew.set(), count(*a)))
        monkeypatch.setattr(drawer.OtherGPUDrawer, "on_lost", lambda *a: (drew.set(), lose(*a)))

        def process(job: Any) -> Any:
            assert not further or not jobs or drew.wait(60.0)
            jobs.append(job)
            job.sd_model_name = "a"
            images = [ImageOps.invert(image) for image in job.init_images]
            return SimpleNamespace(images=images, infotexts=["here"] * len(images))

        state: Any = StandInState()
        state.job_no = 0
        result = run_batch_job(
            p,
            BatchJob([folder], tmp_path / "out", OwnSize(), seed=3, batch_size=1),
            process=process,
            state=state,
            identity={"checkpoint": "abc"},
            further=lambda one: drawer.drawers_on_other_gpus(p, further, one),
        )
        assert len(jobs) == 6 - sum(result.drawn_by.values())
        assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == NAMES
        assert state.job_no == sum(result.drawn_by.values())
        return result, jobs

    return run


def test_a_folder_is_shared_out(run: Any) -> None:
    result, jobs = run("draws", 2)
    assert len(jobs) < 6
    assert set(result.drawn_by) <= {"process 2", "process 3"}
    assert result.lost == {}
    assert "of them on process" in result.summary()
    assert {"here", "a fox, b, balanced"} == set(result.infotexts)


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("ends", "process 2 stopped drawing: the WebUI there has ended (1)."),
        ("dies", "process 2 stopped drawing: the WebUI there has ended (3)."),
        ("fails", "process 2 stopped drawing: no memory."),
        ("other scripts", "process 2 stopped drawing: the WebUI there has other scripts."),
        ("answers with a lock", "process 2 stopped drawing: cannot pickle"),
    ],
)
def test_the_host_draws_what_others_cannot(run: Any, way: str, said: str) -> None:
    result, jobs = run(way, 1)
    assert len(jobs) == 6
    assert said in result.summary()


def test_nothing_is_drawn_there_before_the_hosts_model_is_known(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's first batch takes longer than the start of a process with another model."""
    from onediff_ext.webui import batch_job
    from onediff_ext.webui.other_gpus import drawer, host_process

    is_ready, has_written = threading.Event(), threading.Event()
    start, write = host_process.HostProcess.start, drawer.OtherGPUDrawer.on_written
    draw = batch_job.HostDrawer.draw

    def started(process: Any, is_wanted: Any) -> Any:
        layout = start(process, is_wanted)
        is_ready.set()
        return layout

    def drawn(one: Any, batch: Any) -> Any:
        if batch.number == 1:
            assert is_ready.wait(60.0)
            assert not has_written.wait(1.0)
        yield from draw(one, batch)

    monkeypatch.setattr(host_process.HostProcess, "start", started)
    monkeypatch.setattr(
        drawer.OtherGPUDrawer, "on_written", lambda *a: (has_written.set(), write(*a))
    )
    monkeypatch.setattr(batch_job.HostDrawer, "draw", drawn)
    result, jobs = run("another model", 1)
    assert len(jobs) == 6
    assert "process 2 stopped drawing: the WebUI there draws with another model" in result.summary()


def test_one_gpu_starts_no_process(run: Any) -> None:
    result, jobs = run("no such way", 0)
    assert len(jobs) == 6
    assert result.summary() == "6 pictures drawn."


def test_another_model_there_is_not_used(host: Any) -> None:
    from onediff_ext.webui.batch_job import model_of
    from onediff_ext.webui.other_gpus.drawer import OtherGPUDrawer
    from onediff_ext.webui.other_gpus.host_process import HostProcess

    process = HostProcess(None, command("another model"), {})
    drawer = SimpleNamespace(
        host_job=lambda batch: job_of(Image.new("RGB", (8, 8))),
        is_interrupted=lambda: False,
        wait_for_model=lambda is_wanted: is_wanted(),
        model=model_of(SimpleNamespace(sd_model_name="a")),
    )
    other: Any = OtherGPUDrawer("GPU 1", drawer, process, SCRIPTS, "b")  # type: ignore[arg-type]
    try:
        assert other.open(lambda: True)
        with pytest.raises(DrawerLostError, match="with another model"):
            list(other.draw(None))
    finally:
        other.close()
