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
from tests.support.host_of_another_gpu import SCRIPTS, Job
from tests.support.other_gpus import command, job_of

ROOT = Path(__file__).parents[2]
NAMES = [f"p{number}" for number in range(6)]


@pytest.fixture(autouse=True)
def _host(host: Any) -> None:
    """The extension's modules are imported on the stand-in."""


def started(way: str) -> Any:
    from onediff_ext.webui.other_gpus.host_process import HostProcess

    return HostProcess(None, command(way), {})


def draw(process: Any, p: Any, is_stopped: Callable[[], bool] = lambda: False) -> Any:
    from onediff_ext.webui.other_gpus.host_job import draw_message

    return process.draw(draw_message(p, "b"), is_stopped)


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


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("dies", r"has ended \(3\)"),
        ("fails", "no memory$"),
        ("exits", "no more$"),
        ("answers with a lock", "cannot pickle"),
        ("is interrupted", "its job was interrupted$"),
    ],
)
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

    with Listener(authkey=b"one") as listener, _Accepting(listener) as accepting:
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
command = [sys.executable, "-m", "tests.support.host_of_another_gpu", sys.argv[1]]
process = HostProcess(None, command, {})
process.start(lambda: True)
if sys.argv[1] == "hangs":
    from types import SimpleNamespace
    from onediff_ext.webui.other_gpus.host_job import draw_message
    p = SimpleNamespace(
        prompt=["a"], seed=[3], init_images=[], override_settings={}, script_args=()
    )
    process._send(draw_message(p, "b"))
    time.sleep(1.0)
print(process._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks the system for a process by its number")
@pytest.mark.parametrize("way", ["draws", "hangs"])
def test_a_process_ends_when_the_webui_is_killed(way: str) -> None:
    webui = subprocess.Popen(
        [sys.executable, "-c", STARTS, way], cwd=ROOT, stdout=subprocess.PIPE, text=True
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
             "--ckpt", "model.safetensors", "--vae-device", "cuda:1", "--listen", "--server-name",
             "0.0.0.0"]  # fmt: skip
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "utf8", "launch.py", *flags])
    monkeypatch.setattr(sys, "argv", [launched, *flags, "--share", "--no-half"])  # of a variable
    found = host_command(Path("/webui/launch.py"))
    prefix = ["-X", "utf8", "launch.py"] if launched == "launch.py" else ["/webui/launch.py"]
    assert found[1 : len(prefix) + 1] == prefix
    rest = found[len(prefix) + 1 :]
    assert rest[:4] == ["--medvram", "--ckpt", "model.safetensors", "--no-half"]
    assert {"--nowebui", "--server-name=127.0.0.1"} <= set(rest)
    assert not {"--listen", "--share", "7860", "a:b", "1", "cuda:1", "0.0.0.0"} & set(rest)


def test_its_api_has_a_password_of_its_own_and_the_gpu_is_its_only_one() -> None:
    from onediff_ext.webui.other_gpus.host_process import HostProcess
    from onediff_ext.webui.other_gpus.messages import VARIABLE

    where = {"address": "a", "key": "00"}
    found = [HostProcess("3", [], {})._environment(where) for _ in range(2)]
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


def test_a_process_has_the_hosts_settings_in_files_of_its_own() -> None:
    from onediff_ext.webui.other_gpus.host_process import HostProcess

    options = {"sd_vae": "a.safetensors", "restore_config_state_file": "x", "odd": Path("b")}
    process = HostProcess(None, [sys.executable, "-c", ECHO], options)
    with pytest.raises(DrawerLostError, match=r"has ended \(0\)"):
        process.start(lambda: True)
    folder = Path(process._folder.name)
    said = json.loads((folder / "log.txt").read_text(encoding="utf-8"))
    assert said == {"sd_vae": "a.safetensors", "restore_config_state_file": "", "odd": "b"}
    process.close()
    assert not folder.exists()


ECHO = """
import sys
(flag,) = (flag for flag in sys.argv if flag.startswith("--ui-settings-file="))
print(open(flag.split("=", 1)[1]).read())
"""


def test_a_process_that_cannot_be_started_is_an_error() -> None:
    from onediff_ext.webui.other_gpus.host_process import HostProcess

    process = HostProcess(None, ["/no/such/python"], {})
    with pytest.raises(DrawerLostError, match="no WebUI can be started there"):
        process.start(lambda: True)
    process.close()


def test_an_interrupt_that_comes_before_the_job_begins_counts(host: Any) -> None:
    from onediff_ext.webui.other_gpus.worker import Worker

    host.shared.state.begin = lambda job: setattr(host.shared.state, "interrupted", False)
    host.shared.state.end = lambda: None
    call_queue: Any = ModuleType("modules.call_queue")
    call_queue.queue_lock = threading.Lock()
    sys.modules["modules.call_queue"] = call_queue
    host.scripts.scripts_img2img = None
    host.processing.StableDiffusionProcessingImg2Img = Job
    host.processing.process_images = lambda p: SimpleNamespace(
        images=[host.shared.state.interrupted], infotexts=[""]
    )
    from onediff_ext.webui.other_gpus.messages import Draw

    worker = Worker("", b"")
    message = Draw({"seed": [1], "override_settings": {}}, (), "")
    assert worker._drawn(message).images == [False]
    worker._interrupt()
    with pytest.raises(DrawerLostError, match="interrupted"):
        worker._drawn(message)


@pytest.mark.parametrize("connects", ["late", "never", "in the middle"])
def test_the_wait_for_a_process_ends_with_its_block(
    monkeypatch: pytest.MonkeyPatch, connects: str
) -> None:
    from multiprocessing.connection import Client, Listener

    from onediff_ext.webui.other_gpus import host_process

    set_result = host_process.Future.set_result

    def slowly(*given: Any) -> None:
        set_result(*given)
        time.sleep(0.3)

    monkeypatch.setattr(host_process.Future, "set_result", slowly)
    started_at = time.monotonic()
    with Listener(authkey=b"one") as listener:
        with host_process._Accepting(listener) as accepting:
            if connects == "late":
                client = threading.Thread(target=Client, args=(listener.address,),
                                          kwargs={"authkey": b"one"})  # fmt: skip
                client.start()
                assert accepting.connection(20.0) is not None
                client.join()
            elif connects == "in the middle":
                half = Client(listener.address)  # it does not answer the challenge yet
                assert accepting.connection(0.2) is None
        if connects == "in the middle":
            half.close()
    assert time.monotonic() - started_at < 10.0
