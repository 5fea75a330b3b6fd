"""Where a worker runs and what it imports: the parent's package, and nothing of other folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onediff_ext
from onediff_ext.building.worker_process import WorkerProcess

pytestmark = pytest.mark.starts_workers

PACKAGE = Path(onediff_ext.__file__).parent
# What a worker imports at its start, torch's imports among them, and what Python itself looks for.
PLANTED = ("queue", "json", "torch", "sitecustomize", "usercustomize", "onediff_ext", "filelock")
TRAP = "import pathlib; pathlib.Path({marker!r}).touch(); raise SystemExit('planted code ran')\n"

# A worker script that prints where it runs and ends; it takes a worker's arguments.
TELLS = """
import json, os, sys
own = os.path.dirname(os.path.abspath(__file__))
package, folders = sys.argv[1:3]
sys.path[:] = [entry for entry in sys.path if entry and entry != own]
sys.path.append(os.path.join(package, "building", "worker"))
from start_worker import import_package
sys.path.pop()
import_package(package, folders)
import onediff_ext
from onediff_ext.building.worker import program
import torch
print(json.dumps({"package": onediff_ext.__file__, "worker": program.__file__,
                  "torch": torch.__file__, "cwd": os.getcwd(), "path": sys.path,
                  "isolated": sys.flags.isolated, "user": sys.flags.no_user_site}), flush=True)
"""

# A worker whose builds are a compiler that reads its standard input to the end.
READS_INPUT = """
import os, stat, subprocess, sys, types
sys.modules["torch"] = types.ModuleType("torch")
from onediff_ext.building.worker import program
def answer(request):
    child = [sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))"]
    done = subprocess.run(child, capture_output=True, text=True, timeout=20)
    return {"read": done.stdout.strip(), "is_pipe": stat.S_ISFIFO(os.fstat(0).st_mode)}
program._answer = answer
sys.exit(program.main([]))
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fill the current folder with modules that create a marker file; yields the marker."""
    folder, marker = tmp_path / "downloaded", tmp_path / "marker"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(TRAP.format(marker=str(marker)))
    monkeypatch.chdir(folder)
    yield marker
    assert not marker.exists()


def started(cache: Path) -> WorkerProcess:
    worker = WorkerProcess("eager", cache)
    try:
        worker._start()
    finally:
        worker.close()
    return worker


@pytest.mark.parametrize("pythonpath", [None, "", ".", f".{os.pathsep}", f"{os.pathsep}."])
def test_nothing_of_the_current_folder_is_imported(
    tmp_path: Path, planted: Path, monkeypatch: pytest.MonkeyPatch, pythonpath: str | None
) -> None:
    if pythonpath is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", pythonpath)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as for `python -c` and `python -m`
    started(tmp_path)


def test_a_folder_may_be_named_relative_to_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    started(Path("cache"))


def told(package_parent: Path, cache: Path, *options: str) -> dict[str, object]:
    """Start a worker from a parent with `package_parent` on its path; return what it prints."""
    script = cache / "tells.py"
    script.write_text(TELLS)
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'onediff' not in p]\n"
        f"sys.path.insert(0, {str(package_parent)!r})\n"
        "from pathlib import Path\n"
        "from onediff_ext.building.worker_process import WorkerProcess\n"
        f"worker = WorkerProcess('eager', Path({str(cache)!r}))\n"
        f"WorkerProcess.script = Path({str(script)!r})\n"
        "heard = []\n"
        "read = worker._read_answer\n"
        "worker._read_answer = lambda timeout_s: heard.append(read(timeout_s))\n"
        "worker._start(); worker.close()\n"
        "import json; print(json.dumps(heard[0]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cache,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heard: dict[str, object] = json.loads(done.stdout)
    return heard


def test_a_worker_runs_the_package_of_its_parent_wherever_that_lies(tmp_path: Path) -> None:
    checkout = tmp_path / "a check-out; with 'signs'"
    shutil.copytree(
        PACKAGE, checkout / "onediff_ext", ignore=shutil.ignore_patterns("assets", "__pycache__")
    )
    (tmp_path / "cache").mkdir()
    heard = told(checkout, tmp_path / "cache")
    assert heard["package"] == str(checkout / "onediff_ext" / "__init__.py")
    assert heard["worker"] == str(checkout / "onediff_ext" / "building" / "worker" / "program.py")
    assert str(checkout) not in heard["path"]  # type: ignore[operator]
    assert Path(str(heard["cwd"])).parent == tmp_path / "cache"
    assert "" not in heard["path"]  # type: ignore[operator]


@pytest.mark.parametrize("option", ["-I", "-E", "-s"])
def test_a_worker_is_as_isolated_as_its_parent(tmp_path: Path, option: str) -> None:
    heard = told(PACKAGE.parent, tmp_path, option)
    assert bool(heard["isolated"]) == (option == "-I")
    assert bool(heard["user"]) == (option in ("-I", "-s"))
    assert heard["package"] == str(PACKAGE / "__init__.py")


def test_standard_input_is_empty_for_libraries_and_compilers() -> None:
    # On Windows they would wait until the worker's next request comes.
    worker = subprocess.Popen(
        [sys.executable, "-c", READS_INPUT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PACKAGE.parent,
        start_new_session=True,  # it ends its group
    )
    assert worker.stdin
    assert worker.stdout
    try:
        for task in ("build", "check load"):
            worker.stdin.write(json.dumps({"task": task}) + "\n")
        worker.stdin.flush()
        heard = [json.loads(worker.stdout.readline() or "null") for _ in range(3)]
    finally:
        worker.stdin.close()
        worker.wait(20)
        worker.stdout.close()
    assert heard == [{"ready": True}, *[{"read": "''", "is_pipe": False}] * 2]
