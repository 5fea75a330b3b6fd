"""Makes a WebUI's checkout a test host: its configs, extensions and models."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tools.hosts.webuis import WebUI

REPOSITORY = Path(__file__).resolve().parents[2]
# The folder for what a WebUI's launcher fetches.
_FETCHED = "repositories"
PROBE = REPOSITORY / "tests" / "live" / "probe"


class CheckoutError(Exception):
    """A folder is not the checkout that was expected."""


def version_note(webui: WebUI, checkout: Path) -> str:
    """Say whether a checkout is the version that the live tests were run with.

    Args:
        webui: The WebUI.
        checkout: Its folder.
    """
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not webui.commit or found == webui.commit:
        return f"{webui.title}: {found[:8] or 'no commit'}"
    return f"{webui.title}: {found[:8] or 'no commit'}; the tests were run with {webui.commit[:8]}"


def fit_to_slim_models(webui: WebUI, checkout: Path) -> None:
    """Tell a WebUI the form of the slim checkpoints' models.

    Args:
        webui: The WebUI.
        checkout: Its folder; its own config files change, and files that it lacks are added.
            Repositories that its launcher has not fetched yet are left out.

    Raises:
        CheckoutError: A file or a text is not there.
    """
    for name, values in webui.slim_configs.items():
        path = _existing(webui, checkout, name)
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, **values}, indent=2) + "\n", encoding="utf-8")
    for name, equal in webui.copies.items():
        if not (checkout / name).exists():
            shutil.copy(_existing(webui, checkout, equal), checkout / name)
    for name, replacements in webui.slim_sources.items():
        repository = Path(*Path(name).parts[:2])
        if repository.parts[0] == _FETCHED and not (checkout / repository).exists():
            continue
        path = _existing(webui, checkout, name)
        source = path.read_text(encoding="utf-8")
        for old, new in replacements:
            if new in source:
                continue
            if old not in source:
                raise CheckoutError(f"{path} has no {old!r}: not the version that was run?")
            source = source.replace(old, new)
        path.write_text(source, encoding="utf-8")


def add_extensions(checkout: Path, extension: Path = REPOSITORY) -> None:
    """Link the extension and the live tests' probe into a WebUI.

    Args:
        checkout: The WebUI's folder.
        extension: The extension's folder.
    """
    for name, target in (("onediff-ext", extension), ("onediff-probe", PROBE)):
        link = checkout / "extensions" / name
        link.parent.mkdir(exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target.absolute(), target_is_directory=True)


def add_models(checkout: Path, models: Path) -> None:
    """Link the files of a folder with models into a WebUI's own.

    Args:
        checkout: The WebUI's folder.
        models: A folder with the subfolders of a WebUI's ``models``.
    """
    for path in sorted(models.glob("*/*.*")):
        link = checkout / "models" / path.parent.name / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(path.absolute())


def _existing(webui: WebUI, checkout: Path, name: str) -> Path:
    path = checkout / name
    if not path.exists():
        raise CheckoutError(f"{path} does not exist. Is {checkout} a checkout of {webui.title}?")
    return path
