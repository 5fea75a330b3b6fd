"""install.py: what it decides, what it hands on, and what it says when it cannot go on."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path, PureWindowsPath
from types import ModuleType, SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

POPEN = subprocess.Popen  # without the fake pip
ROOT = Path(__file__).resolve().parents[2]
IN_THREE = ["--numprocesses=3", "--dist=loadfile"]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def project_requirements() -> list[str]:
    """The project's own dependencies; by hand, for Python 3.10 has no tomllib."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"([^"]+)"', text.partition("\ndependencies = [")[2].partition("]")[0])


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """install.py as a module of its own, with no settings from the shell."""
    monkeypatch.delenv("ONEDIFF_TORCH", raising=False)
    monkeypatch.delenv("ONEDIFF_PIP_ARGS", raising=False)
    monkeypatch.delenv("ONEDIFF_ONEFLOW_VENV", raising=False)
    spec = importlib.util.spec_from_file_location("onediff_install", ROOT / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakePip:
    """Stands in for the processes that set-up starts: records pip's arguments, makes venvs.

    `fails_with` is what pip prints before it exits with 1.
    """

    def __init__(self, install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.installed: list[list[str]] = []
        self.made: list[Path] = []
        self.fails_with = ""
        self.interrupt = False
        self.environments: list[dict[str, str]] = []
        self._install = install
        monkeypatch.setattr(install, "make_venv", self._make)
        monkeypatch.setattr(install, "is_healthy", lambda python: python.exists())
        monkeypatch.setattr(install.subprocess, "Popen", self._popen)
        monkeypatch.setattr(install.shutil, "which", lambda _: None)

    def _make(self, venv: Path, lock: int | None = None) -> None:
        self.made.append(venv)
        python = self._install.venv_python(venv)
        python.parent.mkdir(parents=True, exist_ok=True)
        (venv / "pyvenv.cfg").touch()
        python.touch()

    def _popen(self, command: list[str], **options: object) -> SimpleNamespace:
        self.installed.append(command[command.index("install") + 1 :])
        self.environments.append(options["env"])  # type: ignore[arg-type]
        options["stdout"].write(self.fails_with.encode())  # type: ignore[attr-defined]
        options["stdout"].flush()  # type: ignore[attr-defined]

        def wait(timeout: float | None = None) -> int:
            if self.interrupt and timeout:
                raise KeyboardInterrupt
            return 1 if self.fails_with else 0

        return SimpleNamespace(wait=wait, terminate=lambda: None)


@pytest.fixture
def pip(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    return FakePip(install, monkeypatch)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder [with] spaces"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


# ------------------------------------------------------------------------ set-up


def test_set_up_installs_torch_first_then_the_project_with_the_same_torch(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    python = install.set_up(project, {"diffusers"})
    assert python == install.venv_python(project / ".venv")
    torch, package = ([word for word in words if word[0] != "-"] for words in pip.installed)
    assert torch == ["off", "torch==2.13.0"]
    assert package == ["off", ".[diffusers]", "torch==2.13.0"]


def test_second_set_up_starts_no_process(install: ModuleType, pip: FakePip, project: Path) -> None:
    install.set_up(project, {"diffusers"})
    pip.installed.clear()
    install.set_up(project, {"diffusers"})
    assert pip.installed == []


def test_further_extra_keeps_the_first_one(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    install.set_up(project, {"test"})
    install.set_up(project, {"diffusers"})
    assert ".[diffusers,test]" in pip.installed[-1]
    assert len(pip.made) == 1
    pip.installed.clear()
    install.set_up(project, {"test"})
    assert pip.installed == []


def test_set_up_for_the_tests_serves_the_other_commands(install: ModuleType) -> None:
    extras = {command: row[0] for command, row in install.COMMANDS.items()}
    assert extras["demo"] == extras["run"] < extras["test"]


def test_changed_pyproject_runs_pip_again_in_the_same_environment(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    install.set_up(project, {"diffusers"})
    (project / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    install.set_up(project, {"diffusers"})
    assert len(pip.installed) == 4
    assert len(pip.made) == 1


@pytest.mark.parametrize("name", ["ONEDIFF_TORCH", "ONEDIFF_PIP_ARGS"])
def test_settings_change_the_digest(
    install: ModuleType, project: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = install.set_up_digest(project)
    monkeypatch.setenv(name, "torch==2.11.0")
    assert install.set_up_digest(project) != before


def test_folder_that_moved_changes_the_digest(install: ModuleType, project: Path) -> None:
    before = install.set_up_digest(project)
    moved = project.rename(project.with_name("moved"))
    assert install.set_up_digest(moved) != before


@pytest.mark.parametrize("stamp", ["", "{", "[]", '{"digest": 1}', '{"extras": ["test"]}'])
def test_damaged_stamp_is_no_stamp(install: ModuleType, tmp_path: Path, stamp: str) -> None:
    (tmp_path / "onediff-setup.json").write_text(stamp)
    assert install.installed_extras(tmp_path, "digest") == set()


def test_stamp_is_absent_while_pip_runs_and_after_it_failed(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    install.set_up(project, {"diffusers"})
    stamp = project / ".venv" / "onediff-setup.json"
    assert json.loads(stamp.read_text())["extras"] == ["diffusers"]
    pip.fails_with = "ERROR: something"
    with pytest.raises(install.SetUpError, match="something"):
        install.set_up(project, {"test"})
    assert not stamp.exists()


@pytest.mark.parametrize(
    ("printed", "made"),
    [
        ("ERROR: No matching distribution found for torch", 1),
        ("Installing collected packages: torch\nERROR: [Errno 28] No space left on device", 2),
    ],
)
def test_environment_is_made_again_when_pip_failed_halfway(
    install: ModuleType, pip: FakePip, project: Path, printed: str, made: int
) -> None:
    pip.fails_with = printed
    with pytest.raises(install.SetUpError):
        install.set_up(project, {"diffusers"})
    pip.fails_with = ""
    install.set_up(project, {"diffusers"})
    assert len(pip.made) == made


def test_interrupted_pip_makes_the_environment_again(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    pip.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        install.set_up(project, {"diffusers"})
    pip.interrupt = False
    install.set_up(project, {"diffusers"})
    assert len(pip.made) == 2
    assert not (project / ".venv-setup" / "unfinished").exists()


def test_lost_python_makes_the_environment_again(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    install.venv_python(project / ".venv").parent.mkdir(parents=True)  # as an older one left it
    install.set_up(project, {"diffusers"})
    install.venv_python(project / ".venv").unlink()
    install.set_up(project, {"diffusers"})
    assert len(pip.made) == 2


def test_state_of_set_up_is_ignored_by_git(install: ModuleType) -> None:
    assert install.ROOT == ROOT
    assert ".venv*/" in (ROOT / ".gitignore").read_text().split()


def test_a_folder_that_is_no_environment_is_not_deleted(
    install: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "thesis.odt").touch()
    with pytest.raises(install.SetUpError, match="in the way"):
        install.check_place(tmp_path / ".venv")
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(install.SetUpError, match="in the way"):
        install.set_up(tmp_path, {"diffusers"})
    assert (tmp_path / ".venv" / "thesis.odt").exists()
    with pytest.raises(install.SetUpError, match="in the way"):  # the first left no trace
        install.set_up(tmp_path, {"diffusers"})


KILLED = """
import install, pathlib, subprocess, sys, types
root, moment = pathlib.Path(sys.argv[1]), sys.argv[2]
def die(*a, **k):
    import os
    os._exit(137)
def process(command, **options):
    def wait(timeout=None):
        return die() if moment == "pip" else 0
    return types.SimpleNamespace(wait=wait, terminate=lambda: None)
def make(venv, lock=None):
    venv.mkdir(parents=True, exist_ok=True)
    (venv / "lib").mkdir(exist_ok=True)
    if moment == "venv":
        die()
    python = install.venv_python(venv)
    python.parent.mkdir(parents=True, exist_ok=True)
    if moment == "half a venv":
        die()
    (venv / "pyvenv.cfg").touch()
    python.touch()
    if moment == "whole venv":
        die()
install.make_venv = make
install.is_healthy = lambda python: python.exists()
install.subprocess.Popen = process
if moment == "stamp":
    real = pathlib.Path.write_text
    def half(self, text, **more):
        real(self, text[:9], **more)
        die()
    pathlib.Path.write_text = half
install.set_up(root, {"diffusers"})
"""


@pytest.mark.parametrize("moment", ["venv", "half a venv", "whole venv", "pip", "stamp"])
def test_a_set_up_that_was_killed_mends_itself(
    install: ModuleType, pip: FakePip, project: Path, moment: str
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(project), moment]
    assert POPEN(command, env=environment).wait() == 137
    python = install.set_up(project, {"diffusers"})
    assert python.exists()
    assert len(pip.made) == (0 if moment == "stamp" else 1)
    assert install.installed_extras(project / ".venv", install.set_up_digest(project))


@pytest.mark.skipif(os.name == "nt", reason="descriptors are inherited on POSIX only")
def test_what_a_killed_set_up_left_running_is_waited_for(
    install: ModuleType, tmp_path: Path
) -> None:
    script = (
        "import install, os, pathlib, subprocess, sys\n"
        "with install.only_one(pathlib.Path(sys.argv[1])) as lock:\n"
        "    child = subprocess.Popen(['sleep', '1.5'], **install._keeping(lock))\n"
        "    os._exit(137)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    start = time.monotonic()
    assert subprocess.run(command, cwd=ROOT).returncode == 137
    with install.only_one(tmp_path / "lock"):
        assert time.monotonic() - start > 1.4


# ------------------------------------------------------------ the path of the folder


@pytest.mark.parametrize(
    "name", ["a$b", "$", "$HOME x", "${x}", "a{b}", 'it\'s "here"', "ä 猫", "%x%"]
)
def test_odd_paths_are_set_up(install: ModuleType, pip: FakePip, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project]\n")
    install.set_up(folder, {"diffusers"})
    for environment in pip.environments:
        # What setuptools does with the path; a variable that it does not know is an error.
        braced = re.sub(r"\$([a-zA-Z_][a-zA-Z_0-9]*)", r"{\1}", str(folder))
        assert braced.format_map(environment)
        assert environment["HOME"] == os.environ["HOME"]


@pytest.mark.parametrize("name", ["a{b", "a}b", "{}", "{0}", "{a.b}", "{a b}"])
def test_a_path_that_setuptools_cannot_take_is_refused_before_anything_is_installed(
    install: ModuleType, pip: FakePip, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(install.SetUpError, match="braces"):
        install.set_up(folder, {"diffusers"})
    assert pip.made == pip.installed == []


@pytest.mark.parametrize("text", ["--index-url 'https://x", '"', "a\\"])
def test_pip_arguments_that_cannot_be_read(
    install: ModuleType,
    pip: FakePip,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    monkeypatch.setenv("ONEDIFF_PIP_ARGS", text)
    assert install.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "ONEDIFF_PIP_ARGS cannot be read" in said
    assert "quotation mark" in said
    assert pip.installed == []


def test_which_index_is_used_is_pip_s_own_configuration(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    install.set_up(project, {"diffusers"})
    assert not [word for words in pip.installed for word in words if "index" in word]
    source = (ROOT / "install.py").read_text(encoding="utf-8")
    assert "pypi.org" not in source
    assert re.findall(r"(?<!extra)-index-url", source) == []


def test_python_without_ensurepip_names_the_package(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        install.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name
    )
    with pytest.raises(install.SetUpError) as caught:
        install.make_venv(tmp_path / ".venv")
    assert f"python{HERE}-venv" in caught.value.hint
    assert not (tmp_path / ".venv").exists()


def test_a_real_environment_is_made_and_healthy(install: ModuleType, tmp_path: Path) -> None:
    venv = tmp_path / "with a space" / ".venv"
    venv.mkdir(parents=True)
    install.make_venv(venv)
    python = install.venv_python(venv)
    assert install.is_healthy(python)
    python.unlink()
    assert not install.is_healthy(python)


def test_second_process_waits_for_the_first(
    install: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = (
        "import install, pathlib, sys\n"
        "with install.only_one(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == "held\n"
        # The first ends while the second sleeps, so the second has met the lock at least once.
        monkeypatch.setattr(install, "time", SimpleNamespace(sleep=lambda _: other.communicate()))
        with install.only_one(tmp_path / "lock"):
            assert other.returncode == 0
    assert capsys.readouterr().err.count("waiting for it") == 1


# ------------------------------------------------------------------ which torch


@pytest.mark.parametrize(
    ("system", "platform", "nvidia", "index"),
    [
        ("nt", "win32", True, "https://download.pytorch.org/whl/cu130"),
        ("nt", "win32", False, None),
        ("posix", "linux", True, None),
        ("posix", "linux", False, None),
        ("posix", "darwin", False, None),
    ],
)
def test_torch_choice(
    install: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    platform: str,
    nvidia: bool,
    index: str | None,
) -> None:
    monkeypatch.setattr(install.shutil, "which", lambda name: name if nvidia else None)
    with monkeypatch.context() as patch:  # pathlib, which pytest uses, must not see this os.name
        patch.setattr(install, "os", SimpleNamespace(name=system, environ=os.environ))
        patch.setattr(install.sys, "platform", platform)
        requirement, arguments, note = install.torch_choice()
    assert requirement == install.TESTED_TORCH
    assert arguments == (["--extra-index-url", index] if index else [])
    assert (index or "") in note
    assert ("CPU build" in note) == (platform == "linux" and not nvidia)


def test_torch_by_the_user(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDIFF_TORCH", "torch==2.11.0")
    assert install.torch_choice()[:2] == ("torch==2.11.0", [])


def test_pip_arguments_of_the_user_reach_pip(
    install: ModuleType, pip: FakePip, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDIFF_PIP_ARGS", "--find-links '/a folder' --no-index")
    install.set_up(project, {"diffusers"})
    for words in pip.installed:
        assert words[-3:] == ["--find-links", "/a folder", "--no-index"]


def test_pinned_torch_is_in_the_range_of_the_project(install: ModuleType) -> None:
    listed = next(name for name in project_requirements() if name.startswith("torch"))
    pinned = install.TESTED_TORCH.removeprefix("torch==")
    assert SpecifierSet(listed.removeprefix("torch")).contains(pinned)


# --------------------------------------------------------- commands and failures


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo"], ["-m", "onediff_ext", "demo"]),
        (["demo", "--steps", "4"], ["-m", "onediff_ext", "demo", "--steps", "4"]),
        (["run", "--version"], ["-m", "onediff_ext", "--version"]),
        (["run", "img2img", "a b", "-h"], ["-m", "onediff_ext", "img2img", "a b", "-h"]),
        (["test"], ["-m", "pytest", *IN_THREE]),
        (
            ["test", "-k", "x or y", "--", "-p"],
            ["-m", "pytest", *IN_THREE, "-k", "x or y", "--", "-p"],
        ),
    ],
)
def test_arguments_go_on_unchanged(
    install: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: list[str],
) -> None:
    handed: list[list[str]] = []
    monkeypatch.setattr(install, "set_up", lambda *_: Path("python"))
    monkeypatch.setattr(install, "hand_over", lambda command: handed.append(command) or 7)
    monkeypatch.chdir(ROOT)
    assert install.main(arguments) == 7
    assert handed == [["python", *expected]]


def test_oneflow_s_tests_go_to_the_python_that_oneflow_has_wheels_for(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[list[str]] = []
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(install, "set_up", lambda *a: made.append(a) or Path("venv-python"))
    monkeypatch.setattr(
        install, "find_python", lambda version: Path(f"python{version[0]}.{version[1]}")
    )
    monkeypatch.setattr(install, "hand_over", lambda command: handed.append(command) or 7)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(install.sys, "version_info", (3, 12, 1, "final", 0))
    assert install.main(["test", "--oneflow", "plans"]) == 7
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 13, "final", 0))
    assert install.main(["test", "--oneflow", "plans"]) == 7
    assert handed == [
        ["python3.10", install.__file__, "test", "--oneflow", "plans"],
        ["venv-python", "-m", "tests.oneflow", "plans"],
    ]
    monkeypatch.setenv("ONEDIFF_ONEFLOW_VENV", "/shared/by/clones")
    install.main(["test", "--oneflow"])
    assert made == [
        (ROOT, {"test-oneflow"}, ".venv-oneflow"),
        (ROOT, {"test-oneflow"}, "/shared/by/clones"),
    ]


def _interpreter(path: Path, version: str) -> Path:
    """Something that answers as an interpreter of this version would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\necho {path}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(os.name == "nt", reason="the interpreters are shell scripts")
def test_a_python_is_found_on_the_path_or_among_pyenv_s(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    with pytest.raises(install.SetUpError, match=r"no Python 3\.97 was found") as caught:
        install.find_python((3, 97))
    assert "pyenv install 3.97" in caught.value.hint
    _interpreter(tmp_path / "pyenv/versions/3.97.1/bin/python", "3.98")  # is not what it says
    mine = _interpreter(tmp_path / "pyenv/versions/3.97.0/bin/python", "3.97")
    assert install.find_python((3, 97)) == mine
    nearer = _interpreter(tmp_path / "bin/python3.97", "3.97")
    assert install.find_python((3, 97)) == nearer


def test_unknown_command_shows_the_usage(
    install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install.main(["dmeo"]) == 2
    printed = capsys.readouterr().err
    assert "unknown command 'dmeo'" in printed
    assert "python install.py demo" in printed


@pytest.mark.parametrize("version", [(3, 8), (3, 9), (3, 14), (4, 0)])
def test_unsupported_python_says_which_are(install: ModuleType, version: tuple[int, int]) -> None:
    with pytest.raises(install.SetUpError, match=r"3\.10 to 3\.13") as caught:
        install.check_python(version)
    assert re.search(r"(python|py -)3\.1[0-3] install\.py demo", caught.value.hint)


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_supported_pythons(install: ModuleType, version: tuple[int, int]) -> None:
    install.check_python(version)


def test_set_up_error_is_a_message_and_a_next_step(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Path:
        raise install.SetUpError("no wheel", "Do this.")

    monkeypatch.setattr(install, "set_up", fail)
    assert install.main(["demo"]) == 1
    assert capsys.readouterr().err == "\ninstall.py: no wheel\n  Do this.\n"


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "where you may write"), (errno.EIO, "again")],
)
def test_errors_of_the_system_have_a_next_step(
    install: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    hint: str,
) -> None:
    def fail(*_: object) -> Path:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(install, "set_up", fail)
    assert install.main(["demo"]) == 1
    assert hint in capsys.readouterr().err


def test_interruption_of_set_up_is_130(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "set_up", stop)
    assert install.main(["demo"]) == 130
    assert "Stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("printed", "hint"),
    [
        ("ERROR: [Errno 28] No space left on device", "disk is full"),
        (
            "WARNING: Retrying: NewConnectionError\nERROR: No matching distribution found",
            "could not be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", f"for Python {HERE}"),
        ("ERROR: ResolutionImpossible: for help visit", "pyproject.toml's range"),
        ("error: subprocess-exited-with-error", "pip.log"),
    ],
)
def test_next_step_after_pip_failed(install: ModuleType, printed: str, hint: str) -> None:
    assert hint in install.pip_hint(printed, Path("pip.log"))


def test_failed_pip_shows_only_its_last_lines(
    install: ModuleType, pip: FakePip, project: Path
) -> None:
    pip.fails_with = "\n".join(f"line {number}" for number in range(500))
    with pytest.raises(install.SetUpError) as caught:
        install.set_up(project, {"diffusers"})
    lines = str(caught.value).splitlines()
    assert len(lines) < 20
    assert lines[-1].strip() == "line 499"
    assert "line 0" in (project / ".venv-setup" / "pip.log").read_text()


def test_paths_of_windows(install: ModuleType) -> None:
    venv = PureWindowsPath(r"C:\Users\A B\onediff\.venv")
    expected = PureWindowsPath(r"C:\Users\A B\onediff\.venv\Scripts\python.exe")
    assert install.venv_python(venv, windows=True) == expected
    assert install.venv_python(Path("/v"), windows=False) == Path("/v/bin/python")


def test_pip_arguments_keep_the_backslashes_of_windows(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"ONEDIFF_PIP_ARGS": r'--find-links "C:\my wheels" --no-index'}
    monkeypatch.setattr(install, "os", SimpleNamespace(name="nt", environ=environ))
    assert install._pip_arguments() == ["--find-links", r"C:\my wheels", "--no-index"]


def test_status_and_interruption_are_the_command_s_own_on_windows(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "os", SimpleNamespace(name="nt", environ=os.environ))
    assert install.hand_over([sys.executable, "-c", "raise SystemExit(9)"]) == 9

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        signals = 1

        def wait(self, timeout: float | None = None) -> int:
            if self.signals:
                self.signals -= 1
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(install.subprocess, "Popen", Interrupted)
    assert install.hand_over([sys.executable, "-c", "raise SystemExit(130)"]) == 130


@pytest.mark.skipif(os.name == "nt", reason="execve is for POSIX")
def test_status_is_the_command_s_own_elsewhere() -> None:
    script = "import install, sys; install.hand_over([sys.executable, '-c', 'raise SystemExit(9)'])"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 9


def test_settings_that_lead_out_of_the_environment_are_left_out(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/webui")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("ONEDIFF_STORE", "/store")
    environment = install.clean_environment()
    assert not {"PYTHONPATH", "PIP_TARGET"} & set(environment)
    assert environment["ONEDIFF_STORE"] == "/store"


# ------------------------------------------------------------- inside a WebUI

LAUNCH = """
import json, os
def is_installed(name):
    return False
def run_pip(command, desc=None, live=False):
    if os.environ.get("FAKE_LAUNCH_FAILS"):
        raise RuntimeError("Couldn't install onediff-ext.\\nCommand: long\\nstderr: longer")
    print("run_pip", command)
"""


def start_in_host(
    webui: Path, *flags: str, **environ: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run install.py as a WebUI does: its root as working folder and on PYTHONPATH."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *flags, str(ROOT / "install.py")],
        capture_output=True,
        text=True,
        cwd=webui,
        env={**os.environ, "PYTHONPATH": str(webui), **environ},
        timeout=60,
    )
    return done, time.monotonic() - start


@pytest.fixture
def webui(tmp_path: Path) -> Path:
    folder = tmp_path / "stable diffusion webui"
    folder.mkdir()
    (folder / "launch.py").write_text(LAUNCH)
    return folder


def test_start_with_nothing_missing_is_quick_and_silent(webui: Path) -> None:
    pytest.importorskip("safetensors")
    runs = [start_in_host(webui) for _ in range(3)]
    for done, _ in runs:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert min(seconds for _, seconds in runs) < 0.3


def test_start_installs_what_is_missing_and_leaves_torch_alone(webui: Path) -> None:
    done, _ = start_in_host(webui, "-S")  # without site-packages, everything is missing
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        'run_pip install --no-deps "safetensors>=0.4.2,<1"',
        'run_pip install --no-deps "filelock>=3.20.3,<5"',
    ]


@pytest.mark.parametrize(
    ("launch", "environ", "said"),
    [
        (LAUNCH, {"FAKE_LAUNCH_FAILS": "1"}, "Couldn't install onediff-ext."),
        ("raise SystemExit(3)", {}, "3"),
        ("import no_such_module", {}, "No module named 'no_such_module'"),
        ("", {}, "no attribute 'is_installed'"),
    ],
)
def test_failure_at_start_is_one_line_and_status_0(
    webui: Path, launch: str, environ: dict[str, str], said: str
) -> None:
    (webui / "launch.py").write_text(launch)
    done, _ = start_in_host(webui, "-S", **environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert said in done.stdout


def test_start_by_a_person_tells_of_the_demo(tmp_path: Path) -> None:
    done, _ = start_in_host(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python install.py demo" in done.stdout


def test_host_requirements_are_the_project_s_but_torch(install: ModuleType) -> None:
    ours = [name for name in project_requirements() if not name.startswith("torch")]
    assert ours == [*install.HOST_REQUIREMENTS.values()]


def test_help_needs_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "install.py"), "-h"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Set up onediff-ext")


def test_importing_it_does_nothing(tmp_path: Path) -> None:
    shutil.copy(ROOT / "install.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-B", "-c", "import install"], capture_output=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["install.py"]
