"""A script ends at once while its workers build, and their graphs are stored all the same."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from onediff_ext.building.build_folder import ALONE_LOCK, remove_stale
from onediff_ext.building.worker.store_alone import STORE_ALONE, AloneWorker
from onediff_ext.core.kind_key import KindKey
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.machine import machine_digest
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session
from onediff_ext.store import BuildHistory, BuildRecords, GraphLibrary
from tests.support import ending_script
from tests.support.kept_exports import kept_exports
from tests.support.processes import processes_with
from tests.support.session_fixtures import SmallUNet

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 1 << 30
PATIENCE_S = 60.0
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
)


@pytest.fixture(scope="module")
def programs() -> dict[str, bytes]:
    """The programs of the small UNet, exported once."""
    small = SmallUNet()
    with tempfile.TemporaryDirectory() as folder, kept_exports():
        options = CompileOptions(backend="eager", store=Path(folder), build="never")
        session = new_session(options)
        compile_pipe(small.pipe, session=session)
        small()
        return {kind.key.digest: kind.export() for kind in session.kinds}


def run_script(folder: Path, programs: dict[str, bytes], when: str) -> None:
    """Run the script, whose builds end when the folder holds a file ``go``."""
    (folder / "tmp").mkdir()
    (folder / "programs.pickle").write_bytes(pickle.dumps(programs))
    # Workers have a folder for temporary files of their own, in the script's.
    go = {"SLOW_WORKER_UNTIL": str(folder / "go")}
    variables = {"PYTHONPATH": str(ROOT), "MARKED": str(folder), **go}
    said = subprocess.run(
        [sys.executable, "-m", "tests.support.ending_script", str(folder), when],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "Traceback" not in said.stderr
    assert "retried" not in said.stderr


def wait_for_end_of(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while processes_with("MARKED", folder):
        assert time.monotonic() < deadline, "a worker does not end"
        time.sleep(0.05)


@needs_proc
@pytest.mark.parametrize("when", ["building", "starting"])
def test_a_script_ends_at_once_and_its_graphs_are_stored(tmp_path, programs, when):
    run_script(tmp_path, programs, when)
    assert len(processes_with("MARKED", tmp_path)) == ending_script.WORKERS
    library = GraphLibrary(tmp_path / "store", LIMIT_BYTES)
    assert library.entries() == []
    (tmp_path / "go").touch()
    wait_for_end_of(tmp_path)
    graphs = library.entries()
    assert len(graphs) == ending_script.WORKERS
    assert {graph.digest for graph in graphs} <= set(programs)
    assert library.verify() == []
    machine = machine_digest(torch.device("cpu"))
    records, history = BuildRecords(library.folder), BuildHistory(library.folder)
    for graph in graphs:
        checked = records.load_check(graph.digest, machine, graph.header.payload_sha256)
        assert checked is not None
        assert not checked.problem
        assert history.build_seconds(machine, "eager", [graph.label])
        assert library.read_payload(graph) == programs[graph.digest]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert {path.name for path in library.folder.locks.folder.iterdir()} <= {"guard.lock"}


@needs_proc
def test_a_script_of_one_picture_gets_all_graphs_built_after_its_end(tmp_path, programs):
    run_script(tmp_path, programs, "drawn")
    assert processes_with("MARKED", tmp_path)
    (tmp_path / "go").touch()
    wait_for_end_of(tmp_path)
    library = GraphLibrary(tmp_path / "store", LIMIT_BYTES)
    graphs = library.entries()
    assert {graph.digest for graph in graphs} == set(programs)
    assert library.verify() == []
    machine = machine_digest(torch.device("cpu"))
    records = BuildRecords(library.folder)
    for graph in graphs:
        assert records.load_check(graph.digest, machine, graph.header.payload_sha256) is not None
    assert list((tmp_path / "tmp").iterdir()) == []


def request_of(library: GraphLibrary, key, graph: Path) -> dict[str, object]:
    return {
        "task": STORE_ALONE, "store": str(library.folder.root), "limit_bytes": LIMIT_BYTES,
        "key": dict(key.entries), "label": "block", "backend": "eager", "machine": "this one",
        "timeout_s": 60, "graph": str(graph),
    }  # fmt: skip


@pytest.fixture
def library(tmp_path) -> GraphLibrary:
    library = GraphLibrary(tmp_path / "store", LIMIT_BYTES)
    library.folder.prepare()
    return library


@pytest.fixture
def graph(tmp_path) -> Path:
    graph = tmp_path / "tmp" / "onediff-build-abcdefgh" / "worker-1" / "graph.bin"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(b"new")
    return graph


@pytest.fixture
def key():
    return KindKey({"block": "one"})


def test_a_graph_that_another_process_has_stored_stays(library, graph, key):
    library.put(key, b"theirs", label="block", backend="eager", build_seconds=1.0, details={})
    AloneWorker(graph.parent).store(request_of(library, key, graph), 2.0)
    stored = library.get(key)
    assert stored is not None
    assert stored.payload == b"theirs"


def test_a_store_that_was_deleted_meanwhile_is_not_made_again(tmp_path, graph, key):
    library = GraphLibrary(tmp_path / "gone", LIMIT_BYTES)
    AloneWorker(graph.parent).store(request_of(library, key, graph), 2.0)
    assert not (tmp_path / "gone").exists()


def sweep(tmp: Path) -> None:
    """Sweep as if everything there were old."""
    for path in (*tmp.rglob("*"), *tmp.iterdir()):
        os.utime(path, (1, 1))
    remove_stale(tmp)


def test_a_build_folder_stays_as_long_as_a_worker_goes_on_in_it(library, graph, key, tmp_path):
    first = AloneWorker(graph.parent)
    second_graph = graph.parent.parent / "worker-2" / "graph.bin"
    second_graph.parent.mkdir()
    second = AloneWorker(second_graph.parent)
    folder = graph.parent.parent
    sweep(tmp_path / "tmp")
    assert folder.exists()
    before = Path.cwd()
    try:
        first.remove_files()
        assert not graph.parent.exists()
        assert second_graph.parent.exists()
        os.utime(folder, (1, 1))
        second.remove_files()
        assert not folder.exists()
    finally:
        os.chdir(before)


def test_a_build_folder_stays_until_a_worker_was_able_to_take_its_lock(graph, tmp_path):
    folder = graph.parent.parent
    (graph.parent / ALONE_LOCK).touch()
    os.utime(folder, (1, 1))
    remove_stale(tmp_path / "tmp")
    assert graph.exists()
    sweep(tmp_path / "tmp")  # the worker died before
    assert not folder.exists()
