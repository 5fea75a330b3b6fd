"""A folder's batches on other GPUs: processes of the WebUI, with a stand-in for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from onediff_ext.core.errors import OptionError
from onediff_ext.pictures.batch.batch_drawer import DrawerLostError
from onediff_ext.pictures.batch.batch_job import BatchJob
from onediff_ext.pictures.size_rules import OwnSize
from tests.support.host_of_another_gpu import SCRIPTS, script
from tests.support.sample_pictures import save_pictures
from tests.support.webui_stand_in import StandInJob, StandInState

ROOT = Path(__file__).parents[2]
NAMES = [f"p{number}" for number in range(6)]


@pytest.fixture(autouse=True)
def _host(host: Any) -> None:
    """The extension's modules are imported on the stand-in."""


def command(way: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.host_of_another_gpu", way]


def started(way: str) -> Any:
    from onediff_ext.webui.other_gpus.host_process import HostProcess

    return HostProcess(None, command(way))


def job_of(image: Image.Image, **more: Any) -> Any:
    p: Any = StandInJob(init_images=[image], prompt=["a fox"], seed=[3])
    p.script_args = (0, "balanced", True, 4)
    vars(p).update(more)
    return p


def draw(process: Any, p: Any, is_stopped: Callable[[], bool] = lambda: False) -> Any:
    from onediff_ext.webui.other_gpus.host_job import draw_message

    return process.draw(draw_message(p, {"checkpoint": "b"}), is_stopped)


def test_another_process_draws_with_the_jobs_values_and_the_hosts_options() -> None:
    image, process = Image.new("RGB", (8, 8), (10, 20, 30)), started("draws")
    try:
        assert process.start(lambda: True) == SCRIPTS
        for _ in range(2):
            answer = draw(process, job_of(image))
            assert list(answer.images) == [ImageOps.invert(image)]
            assert answer.infotexts == ["a fox, b, balanced"]
    finally:
        process.close()
    assert process._process.returncode == 0


@pytest.mark.parametrize(("way", "said"), [("dies", r"has ended \(3\)"), ("fails", "no memory$")])
def test_a_job_that_is_not_drawn_there_is_an_error(way: str, said: str) -> None:
    process = started(way)
    try:
        process.start(lambda: True)
        with pytest.raises(DrawerLostError, match=said):
            draw(process, job_of(Image.new("RGB", (8, 8))))
    finally:
        process.close()
    assert process._process.poll() is not None


def test_a_process_that_ends_before_it_is_ready_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = started("ends")
    with pytest.raises(DrawerLostError, match="has ended"):
        process.start(lambda: True)
    process.close()
    assert "no checkpoint" in caplog.text


def test_a_process_that_is_not_wanted_any_more_is_ended() -> None:
    process = started("never ready")
    ends_at = time.monotonic() + 1.0
    assert process.start(lambda: time.monotonic() < ends_at) is None
    process.close()
    assert process._process.poll() is not None
    assert "onediff-accept" not in {thread.name for thread in threading.enumerate()}


def test_a_process_with_another_key_is_not_heard() -> None:
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client, Listener

    from onediff_ext.webui.other_gpus.host_process import _Accepting

    with Listener(authkey=b"one") as listener, _Accepting(listener, b"one") as accepting:
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Client(listener.address, authkey=b"another")
        with pytest.raises(DrawerLostError, match="cannot be reached"):
            accepting.connection(20.0)


def test_an_interrupted_job_is_interrupted_there() -> None:
    process = started("waits")
    try:
        process.start(lambda: True)
        assert draw(process, job_of(Image.new("RGB", (8, 8))), lambda: True) is None
    finally:
        process.close()
    assert process._process.returncode == 0


STARTS = """
import sys, time
from tests.support.webui_stand_in import install_modules
import pytest
install_modules(pytest.MonkeyPatch())
from onediff_ext.webui.other_gpus.host_process import HostProcess
process = HostProcess(None, [sys.executable, "-m", "tests.support.host_of_another_gpu", "draws"])
process.start(lambda: True)
print(process._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks the system for a process by its number")
def test_a_process_ends_when_the_webui_is_killed() -> None:
    webui = subprocess.Popen(
        [sys.executable, "-c", STARTS], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert webui.stdout is not None
    pid = int(webui.stdout.readline())
    webui.kill()
    webui.wait()
    webui.stdout.close()
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("the process on another GPU is still there")


@pytest.fixture
def run(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], tuple[Any, list[Any]]]:
    """Run a folder of six pictures on processes that draw in a way; returns the result, and the
    jobs of the host itself."""
    paths: Any = ModuleType("modules.paths_internal")
    paths.script_path = str(ROOT)
    monkeypatch.setitem(sys.modules, "modules.paths_internal", paths)
    host.shared.opts.data = {"checkpoint": "b"}
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
            assert not further or drew.wait(60.0)
            jobs.append(job)
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
    ],
)
def test_the_host_draws_what_others_cannot(run: Any, way: str, said: str) -> None:
    result, jobs = run(way, 1)
    assert len(jobs) == 6
    assert said in result.summary()


def test_one_gpu_starts_no_process(run: Any) -> None:
    result, jobs = run("no such way", 0)
    assert len(jobs) == 6
    assert result.summary() == "6 pictures drawn."


def test_a_job_that_cannot_be_sent_names_what_is_in_the_way() -> None:
    from onediff_ext.webui.other_gpus.host_job import check_sendable

    check_sendable(job_of(Image.new("RGB", (8, 8)), rng=threading.Lock()))  # the host makes it
    with pytest.raises(OptionError, match="its hook cannot be sent"):
        check_sendable(job_of(Image.new("RGB", (8, 8)), hook=threading.Lock()))
    p = job_of(Image.new("RGB", (8, 8)))
    p.script_args = (0, threading.Lock())
    with pytest.raises(OptionError, match=r"argument 1 of its scripts .*Choose 1 GPU"):
        check_sendable(p)


@pytest.mark.parametrize("launched", ["launch.py", "elsewhere.py"])
def test_the_command_is_the_hosts_without_page_and_gpu(
    monkeypatch: pytest.MonkeyPatch, launched: str
) -> None:
    from onediff_ext.webui.other_gpus.host_process import host_command

    flags = ["--port", "7860", "--medvram", "--api", "--api-auth=a:b", "--device-id", "1",
             "--ckpt", "model.safetensors", "--listen", "--server-name", "0.0.0.0"]  # fmt: skip
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "utf8", "launch.py", *flags])
    monkeypatch.setattr(sys, "argv", [launched, *flags, "--share", "--no-half"])  # of a variable
    found = host_command(Path("/webui/launch.py"))
    prefix = ["-X", "utf8", "launch.py"] if launched == "launch.py" else ["/webui/launch.py"]
    assert found[1 : len(prefix) + 1] == prefix
    rest = found[len(prefix) + 1 :]
    assert rest[:4] == ["--medvram", "--ckpt", "model.safetensors", "--no-half"]
    assert {"--nowebui", "--server-name=127.0.0.1"} <= set(rest)
    assert not {"--listen", "--share", "7860", "a:b", "1", "0.0.0.0"} & set(rest)


def test_its_api_has_a_password_of_its_own_and_the_gpu_is_its_only_one() -> None:
    from onediff_ext.webui.other_gpus.host_process import HostProcess
    from onediff_ext.webui.other_gpus.messages import VARIABLE

    where = {"address": "a", "key": "00"}
    found = [HostProcess("3", [])._environment(where) for _ in range(2)]
    assert found[0]["CUDA_VISIBLE_DEVICES"] == "3"
    assert json.loads(found[0][VARIABLE]) == where
    passwords = {each["COMMANDLINE_ARGS"] for each in found}
    assert len(passwords) == 2
    assert all(text.startswith("--api-auth=onediff:") and len(text) > 50 for text in passwords)


@pytest.mark.parametrize(
    ("visible", "own", "expected"),
    [
        (None, 0, [("GPU 1", "1"), ("GPU 2", "2")]),
        (None, 2, [("GPU 0", "0"), ("GPU 1", "1")]),
        ("5,7,GPU-ab", 1, [("GPU 5", "5"), ("GPU GPU-ab", "GPU-ab")]),
    ],
)
def test_the_other_gpus(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    own: int,
    expected: list[tuple[str, str]],
) -> None:
    from onediff_ext.webui import host_access

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(host_access, "host_device", lambda: torch.device("cuda", own))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host_access.further_gpus(2) == expected
    assert host_access.further_gpus(9) == expected


def test_only_options_that_differ_are_set(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from onediff_ext.webui.host_access import set_options

    done: list[tuple[Any, ...]] = []
    host.shared.opts.data = {"a": 1, "b": 2}
    host.shared.opts.set = lambda *given: done.append(given)
    set_options({"a": 1, "b": 3})
    assert done == [("b", 3)]
    sysinfo: Any = ModuleType("modules.sysinfo")
    sysinfo.set_config = lambda changed, save_config: done.append((changed, save_config))
    monkeypatch.setitem(sys.modules, "modules.sysinfo", sysinfo)
    set_options({"a": 1, "b": 3})
    assert done[1:] == [({"b": 3}, False)]
