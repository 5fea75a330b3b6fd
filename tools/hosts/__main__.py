"""Test hosts: the WebUIs of the live tests, on a CPU.

    python -m tools.hosts build forge /path/to/checkout
    python -m tools.hosts start forge /path/to/checkout
    python -m tools.hosts test forge /path/to/checkout

The first makes a checkout of a WebUI ready: a virtual environment, slim random models, and links to
this extension and to the live tests' probe. The second starts it. The third runs the live tests
against it, from another terminal. See tests/live/README.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.hosts.checkout import (
    REPOSITORY,
    CheckoutError,
    add_extensions,
    add_models,
    fit_to_slim_models,
    version_note,
)
from tools.hosts.packages import make_environment
from tools.hosts.webuis import WEBUIS, WebUI

_LAUNCHER = Path(__file__).with_name("run_in_venv.py")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # further options are the WebUI's or pytest's
    )
    parser.add_argument("command", choices=("build", "start", "test"))
    parser.add_argument("webui", choices=tuple(WEBUIS))
    parser.add_argument("checkout", type=Path, help="the WebUI's folder")
    parser.add_argument("--python", default="python3.11", help="build: the interpreter")
    parser.add_argument("--models", type=Path, help="build: where slim models are kept and shared")
    parser.add_argument("--extension", type=Path, default=REPOSITORY, help="build: what to link")
    chosen, further = parser.parse_known_args(arguments)
    webui, checkout = WEBUIS[chosen.webui], chosen.checkout.absolute()
    try:
        if chosen.command == "start":
            return start(webui, checkout, further)
        if chosen.command == "test":
            return test(webui, checkout, further)
        if further:
            parser.error(f"unknown: {' '.join(further)}")
        models = (chosen.models or checkout / "slim-models").absolute()
        build(webui, checkout, chosen.python, models, chosen.extension)
    except CheckoutError as exc:
        print(exc, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as exc:
        print(f"failed: {' '.join(map(str, exc.cmd))}", file=sys.stderr)
        return 1
    return 0


def build(webui: WebUI, checkout: Path, python: str, models: Path, extension: Path) -> None:
    """Make a checkout a test host. What is there already is kept.

    Args:
        webui: The WebUI.
        checkout: Its folder.
        python: The interpreter of its virtual environment.
        models: Folder of the slim models; written when it does not exist.
        extension: The extension to link.

    Raises:
        CheckoutError: The folder is no checkout of it.
        subprocess.CalledProcessError: Packages or repositories could not be installed.
    """
    if not (checkout / webui.requirements).exists():
        raise CheckoutError(f"{checkout} is no checkout of {webui.title}.")
    print(version_note(webui, checkout))
    fit_to_slim_models(webui, checkout)
    interpreter = make_environment(webui, checkout, python)
    add_extensions(checkout, extension)
    from tools.hosts.models import write_demo_models, write_slim_models

    if webui.loads_demo:
        write_demo_models(checkout / "models")
    else:
        if not models.exists():  # written completely or not at all
            unfinished = models.with_name(f"{models.name}.unfinished")
            write_slim_models(unfinished)
            unfinished.rename(models)
        add_models(checkout, models)
    if webui.preparing_flags:
        command = [interpreter, _LAUNCHER, "launch.py", *webui.preparing_flags]
        subprocess.run(list(map(str, command)), cwd=checkout, check=True)
        fit_to_slim_models(webui, checkout)  # what the launcher has fetched


def start(webui: WebUI, checkout: Path, flags: list[str]) -> int:
    """Start a WebUI in this process, with further flags of its own."""
    interpreter = str(checkout / "venv" / "bin" / "python")
    if not Path(interpreter).exists():
        raise CheckoutError(f"{checkout} is not built: python -m tools.hosts build …")
    os.chdir(checkout)
    # Nothing of this program's own environment is a package of the WebUI.
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    command = [interpreter, str(_LAUNCHER), "launch.py", "--api", "--port", str(webui.port)]
    os.execve(interpreter, [*command, *webui.flags, *flags], environment)


def test(webui: WebUI, checkout: Path, arguments: list[str]) -> int:
    """Run the live tests against a WebUI that was started; further arguments are pytest's.

    Variables that are set already stay, such as ``ONEDIFF_WEBUI_URL``.

    Returns:
        pytest's exit status.

    Raises:
        CheckoutError: The folder is no test host.
    """
    if not (checkout / "extensions" / "onediff-probe").exists():
        raise CheckoutError(f"{checkout} is not built: python -m tools.hosts build …")
    named = any((REPOSITORY / name.split("::")[0]).exists() for name in arguments)
    command = [sys.executable, "-m", "pytest", *([] if named else ["tests/live"]), *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=live_environment(webui, checkout) | os.environ, check=False
    ).returncode


def live_environment(webui: WebUI, checkout: Path) -> dict[str, str]:
    """Environment variables that tell the live tests where a WebUI and its checkpoints are."""
    return {
        "ONEDIFF_WEBUI_URL": f"http://127.0.0.1:{webui.port}",
        "ONEDIFF_WEBUI_ROOT": str(checkout),
        **webui.checkpoints,
    }


if __name__ == "__main__":
    sys.exit(main())
