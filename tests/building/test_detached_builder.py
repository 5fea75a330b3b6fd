"""A forked process that builds what is missing after the end of the one that forked it."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.building import detached_builder, inherited_files
from onediff_ext.building.build_folder import BuildFolder
from onediff_ext.building.detached_builder import DetachedBuilder
from onediff_ext.core.kind_key import KindKey
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.store import GraphLibrary
from tests.support.systems import needs_fork

pytestmark = needs_fork
TIMEOUT_S = 30
WORKERS = 2


class Workers:
    """A build context whose workers only write down what they are given."""

    def __init__(self, tmp_path: Path) -> None:
        self.library = GraphLibrary(tmp_path / "store", 1 << 20)
        self.folder = tmp_path / "given"
        self.folder.mkdir()

    def store_request(self, kind: Any) -> dict[str, object]:
        return {"label": kind.label}

    def new_worker(self, folder: Path, in_background: bool) -> Any:
        assert in_background
        assert folder.is_dir()
        return SimpleNamespace(build_alone=self._build_alone)

    def _build_alone(self, tasks: list[tuple[bytes, dict[str, object]]], device: str) -> None:
        for program, request in tasks:
            text = json.dumps([request["label"], program.decode(), device, os.getpid()])
            (self.folder / str(request["label"])).write_text(text)

    @property
    def given(self) -> dict[str, list[Any]]:
        return {path.name: json.loads(path.read_text()) for path in self.folder.iterdir()}


@pytest.fixture
def context(tmp_path, monkeypatch) -> Any:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(detached_builder, "safe_parent", lambda _: tmp_path / "tmp")
    return Workers(tmp_path)


def kind(label: str, export: Callable[[], bytes] | None = None) -> Any:
    return SimpleNamespace(
        key=KindKey({"block": label}),
        label=label,
        device=torch.device("cpu"),
        blocks=[],
        prepare_export=lambda device: export or (lambda: f"{label} on {device}".encode()),
    )


def wait_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:  # a grandchild
            if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
                return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("it does not end")


def test_it_builds_what_is_missing_after_it_was_told(context) -> None:
    def broken() -> bytes:
        raise RuntimeError("no graph")

    stored, begun = kind("stored"), kind("begun")
    context.library.put(
        stored.key, b"graph", label="stored", backend="eager", build_seconds=1.0, details={}
    )
    kinds = [kind("one"), stored, kind("broken", broken), begun, kind("two")]
    detached = DetachedBuilder(context, kinds, WORKERS)
    time.sleep(0.2)
    assert not context.given
    assert detached.take_over([begun.key])
    wait_for_end_of(detached._pid)
    given = context.given
    assert {label: entry[1:3] for label, entry in given.items()} == {
        label: [f"{label} on cpu", "cpu"] for label in ("one", "two")
    }
    assert {entry[3] for entry in given.values()} == {detached._pid}


def test_it_answers_at_the_priority_of_its_parent_and_builds_at_a_low_one(context) -> None:
    """At a low one, it did not answer in time on a machine whose cores were busy."""

    def priority(pid: int = 0) -> int:
        return os.getpriority(os.PRIO_PROCESS, pid)

    detached = DetachedBuilder(context, [kind("one", lambda: str(priority()).encode())], WORKERS)
    time.sleep(0.2)
    assert priority(detached._pid) == priority()
    assert detached.take_over([])
    wait_for_end_of(detached._pid)
    assert int(context.given["one"][1]) > priority()


def test_it_ends_when_it_is_dismissed(context) -> None:
    detached = DetachedBuilder(context, [kind("one")], WORKERS)
    detached.dismiss()
    with pytest.raises(ProcessLookupError):
        os.kill(detached._pid, 0)
    assert not context.given


def test_a_process_that_does_not_answer_is_ended(context, monkeypatch) -> None:
    def hangs(keep: int) -> None:
        time.sleep(TIMEOUT_S)

    monkeypatch.setattr(detached_builder, "let_go_of_inherited", hangs)
    detached = DetachedBuilder(context, [kind("one")], WORKERS)
    assert not detached.take_over([], timeout_s=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(detached._pid, 0)


def test_an_export_that_hangs_ends_it(context, monkeypatch) -> None:
    monkeypatch.setattr(detached_builder, "_EXPORT_TIMEOUT_S", 1)

    def hangs() -> bytes:
        threading.Event().wait()
        return b""

    detached = DetachedBuilder(context, [kind("one", hangs)], WORKERS)
    assert detached.take_over([])
    wait_for_end_of(detached._pid)
    assert not context.given


def test_it_ends_with_a_parent_that_is_killed(context, tmp_path) -> None:
    parent = os.fork()
    if parent == 0:
        detached = DetachedBuilder(context, [kind("one")], WORKERS)
        (tmp_path / "pid").write_text(str(detached._pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for_end_of(int((tmp_path / "pid").read_text()))
    assert not context.given


def test_builds_that_end_dismiss_it(open_session, small, instant_workers, monkeypatch) -> None:
    made: list[DetachedBuilder] = []

    class Seen(DetachedBuilder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("onediff_ext.building.builder.DetachedBuilder", Seen)
    session = open_session()
    session.build_context.export_children = 1
    compile_pipe(small.pipe, session=session)
    small()
    assert session.wait_for_builds(TIMEOUT_S)
    (detached,) = made
    with pytest.raises(ProcessLookupError):
        os.kill(detached._pid, 0)


def test_ports_are_free_while_it_waits(context) -> None:
    """A WebUI that starts again needs its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        detached = DetachedBuilder(context, [kind("one")], WORKERS)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                socket.create_server(address, reuse_port=False).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        detached.dismiss()


def test_device_files_are_closed_and_unmapped(tmp_path, monkeypatch) -> None:
    path, log = tmp_path / "nvidia0", tmp_path / "log"
    path.write_bytes(bytes(mmap.PAGESIZE))
    monkeypatch.setattr(inherited_files, "_GPUS", str(tmp_path / "nvidia"))
    with path.open("r+b") as file, log.open("w") as logged:
        mapped = mmap.mmap(file.fileno(), 0)
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            inherited_files.let_go_of_inherited(keep=theirs)
            new = os.open(tmp_path / "new", os.O_CREAT | os.O_WRONLY)
            links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            print("said", file=logged, flush=True)
            is_open = str(path) in links or str(log) in links
            is_mapped = str(path) in Path("/proc/self/maps").read_text()
            os.write(theirs, json.dumps([is_open, is_mapped, new == logged.fileno()]).encode())
            os._exit(0)
        os.close(theirs)
        assert json.loads(os.read(ours, 100)) == [False, False, False]
        os.waitpid(pid, 0)
        os.close(ours)
        assert mapped[0] == 0
        mapped.close()
    assert log.read_text() == ""
    assert (tmp_path / "new").read_bytes() == b""


def test_a_build_folder_is_left_to_the_workers(context, tmp_path) -> None:
    detached = DetachedBuilder(context, [kind("one")], WORKERS)
    assert detached.take_over([])
    wait_for_end_of(detached._pid)
    # No worker holds it, so the next build folder sweeps it.
    BuildFolder(tmp_path / "tmp").remove()
    assert list((tmp_path / "tmp").iterdir()) == []
