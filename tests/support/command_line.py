"""The command line as a user has it: fixtures of the tests that use it.

A test module asks for it with ``pytest_plugins = ("tests.support.command_line",)``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = 17
"""Kinds of the checkpoint "sd15", its VAE's included."""
PROGRESS = ("building graphs ", "pictures ")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        status: Exit status.
        out, err: What it printed.
    """

    status: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """Lines on the standard error that are no progress."""
        return [line for line in self.err.splitlines() if not line.startswith(PROGRESS)]

    def refused(self, message: str, hint: str = "") -> None:
        """Check that the command said in two lines what is wrong and what to do."""
        assert self.status == 2, self.err
        assert len(self.said) == 2, self.err
        first, second = self.said
        assert first.startswith("onediff-ext"), first
        assert message in first
        assert second.startswith("  "), second
        assert second.strip()
        assert hint in second


class CommandLine:
    """Runs `onediff-ext` with a tiny checkpoint and the backend that compiles nothing.

    Args:
        folder: For checkpoints.
        store: Graph store; the graphs of the checkpoint "sd15" are in it.
    """

    def __init__(self, folder: Path, store: Path) -> None:
        self._folder, self.store = folder, store

    @functools.cache  # noqa: B019 - one instance, as long as the session
    def checkpoint(self, name: str = "sd15", seed: int = 0) -> Path:
        """A checkpoint file of an architecture that `tests.support.models` knows."""
        from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
        from tests.support import models

        return save_ldm(models.BUILDERS[name](seed), self._folder / f"{name}-{seed}.safetensors")

    @functools.cache  # noqa: B019
    def lora(self, layout: str, name: str = "sd15") -> Path:
        """A LoRA file for an architecture, the same numbers in either layout."""
        from tests.support import adapter_weights, models

        path = self._folder / f"lora-{name}-{layout}.safetensors"
        return adapter_weights.save_lora(models.BUILDERS[name](), path, layout)

    def arguments(self, *arguments: object, store: Path | None = None) -> list[str]:
        """A whole command: checkpoint, store and backend added where they are not given."""
        command = [str(argument) for argument in arguments]
        if command[0] in ("img2img", "txt2img", "warmup", "bench"):
            if not {"-m", "--model"} & set(command):
                command += ["-m", str(self.checkpoint())]
            if not {"--backend", "--eager"} & set(command):
                command += ["--backend", "eager"]
        # Which graphs a run has must not depend on how fast the machine is.
        chosen = {"--build", "--no-build", "--eager"} & set(command)
        if command[0] in ("img2img", "txt2img") and not chosen:
            command += ["--build", "wait"]
        return command if "--store" in command else [*command, "--store", str(store or self.store)]

    def __call__(self, *arguments: object, store: Path | None = None) -> Ended:
        """Run a command in this process."""
        return run_here(self.arguments(*arguments, store=store))

    def spawn(self, *arguments: object, store: Path | None = None, **popen: Any) -> Any:
        """Start a command as a process of its own."""
        command = [sys.executable, "-m", "onediff_ext", *self.arguments(*arguments, store=store)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **popen.pop("env", {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, **{**streams, **popen})

    def process(self, *arguments: object, store: Path | None = None, **popen: Any) -> Ended:
        """Run a command as a process of its own."""
        process = self.spawn(*arguments, store=store, **popen)
        out, err = process.communicate(timeout=120)
        return Ended(process.returncode, out, err)


def run_here(command: list[str]) -> Ended:
    """Run `onediff-ext` in this process, as a fresh one would log and exit."""
    from onediff_ext.cli.main import main
    from tests.support.quick_builds import quick_loads
    from tests.support.shared_tokenizers import shared_tokenizers

    out, err = io.StringIO(), io.StringIO()
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()  # tests before may have compiled
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []  # main() adds its own to the new stderr
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            quick_loads(),
            shared_tokenizers(),
        ):
            status = main(command)
    except SystemExit as exc:  # argparse
        status = int(exc.code or 0)
    finally:
        root.handlers = handlers
    return Ended(status, out.getvalue(), err.getvalue())


def in_child(work: Callable[[], int]) -> int:
    """Do some work in a forked process, which has all modules already; returns its status."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture(scope="session")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """The command line, the graphs of its checkpoint stored."""
    from tests.support.quick_builds import quick_builds

    folder = tmp_path_factory.mktemp("command-line")
    command_line = CommandLine(folder, folder / "store")
    with quick_builds():
        ended = command_line("warmup", "64x64")
    assert ended.status == 0, ended
    assert f"{KINDS} graphs built, 0 loaded" in ended.out
    return command_line


@pytest.fixture
def run(command_line: CommandLine, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``run(*arguments)`` is an img2img that must succeed; returns its report."""

    def run(*arguments: object, status: int = 0, store: Path | None = None) -> dict[str, Any]:
        report = tmp_path / "report.json"
        steps = [] if "--steps" in arguments else ["--steps", "2", "--strength", "1"]
        command = ["img2img", *arguments, *steps, "--report", report]
        ended = command_line(*command, store=store)
        assert ended.status == status, ended
        loaded: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return loaded

    return run
