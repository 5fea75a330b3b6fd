"""The wheel has all that it needs: it draws a picture from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("onediff_ext", "pyproject.toml", "README.md", "LICENSE")


def run(*command: object, cwd: Path, site: Path | None = None) -> str:
    """Return the output of a command, which must succeed."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment = kept if site is None else {**kept, "PYTHONPATH": str(site)}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into its source tree
    source.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, source / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", folder / "site", wheel, cwd=folder)
    return folder / "site"


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
