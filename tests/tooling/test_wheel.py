"""The wheel has all that it needs: it draws a picture from another folder.

The last test installs it with its requirements in an empty environment. That takes minutes and a
package index, so it runs only where the variable in `EMPTY_ENVIRONMENT` is set.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("onediff_ext", "pyproject.toml", "README.md", "LICENSE")
PIP = ("-m", "pip", "--disable-pip-version-check")
EMPTY_ENVIRONMENT = "ONEDIFF_TEST_EMPTY_ENVIRONMENT"


def run(*command: object, cwd: Path, site: Path | None = None, timeout_s: float = 300) -> str:
    """Return the output of a command, which must succeed."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment = kept if site is None else {**kept, "PYTHONPATH": str(site)}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into its source tree
    source.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, source / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, source)
    options = ("--no-deps", "--no-build-isolation", "-w", folder)
    run(sys.executable, *PIP, "wheel", *options, source, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """A folder with the installed wheel and nothing else."""
    folder = wheel.parent / "site"
    run(sys.executable, *PIP, "install", "--no-deps", "--target", folder, wheel, cwd=wheel.parent)
    return folder


def test_the_version_is_the_packages(site: Path, tmp_path: Path) -> None:
    import onediff_ext

    assert (site / f"onediff_ext-{onediff_ext.__version__}.dist-info").is_dir()
    told = run(sys.executable, "-m", "onediff_ext", "--version", cwd=tmp_path, site=site)
    assert onediff_ext.__version__ in told


def test_types_come_along(site: Path) -> None:
    assert (site / "onediff_ext" / "py.typed").is_file()


def test_a_picture(site: Path, tmp_path: Path) -> None:
    """With the demo checkpoint, the tokenizer and the configs that are in the wheel."""
    where = "import onediff_ext; print(onediff_ext.__file__)"
    assert run(sys.executable, "-c", where, cwd=tmp_path, site=site).startswith(str(site))
    run(
        sys.executable, "-m", "onediff_ext", "txt2img", "-p", "a cat", "--sizes", "64x64",
        "--steps", "1", "--device", "cpu", "--backend", "eager", "--store", "store", "-o", "out",
        cwd=tmp_path, site=site,
    )  # fmt: skip
    assert len(list((tmp_path / "out").glob("*.png"))) == 1


@pytest.mark.skipif(
    not os.environ.get(EMPTY_ENVIRONMENT),
    reason=f"installs torch and builds graphs, minutes each: {EMPTY_ENVIRONMENT}=1 runs it",
)
@pytest.mark.timeout(4800)
def test_the_demo_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """The wheel names all packages that its demo needs, and brings its command."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    torch = f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    more = shlex.split(os.environ.get("ONEDIFF_PIP_ARGS", ""))
    wanted = (torch, f"{wheel}[diffusers]")
    run(programs / "python", *PIP, "install", *more, *wanted, cwd=tmp_path, timeout_s=1200)
    away = tmp_path / "away"
    away.mkdir()
    demo = (programs / "onediff-ext", "demo", "--store", "store", "--report", "report.json")
    run(*demo, cwd=away, timeout_s=3000)
    report = json.loads((away / "report.json").read_text("utf-8"))
    assert len(report["pictures"]) == 10
    assert all(Path(away, picture["output"]).is_file() for picture in report["pictures"])
    assert report["graphs"]["built"] > 0
    assert report["skipped"] == []
    assert (away / "demo-output" / "contact-sheet.jpg").is_file()
