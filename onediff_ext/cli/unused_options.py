"""Options that would do nothing: refused, with the other option or the command that is the reason.

An option counts as given when the user has written it, whatever its value. Values that depend on
the model, such as DeepCache for a transformer, are checked where the model is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class UnusedHere:
    """A command with options that it shares with others but has no use for.

    Args:
        command: Its words after ``onediff-ext``.
        options: They are not listed in its help.
        why: What the command does instead.
        hint: The next step.
    """

    command: str
    options: tuple[str, ...]
    why: str
    hint: str = "Leave it out."

    def refusal(self, option: str) -> tuple[str, str]:
        """Return message and hint."""
        return f"{option} cannot be used here: {self.why}", self.hint


@dataclass(frozen=True)
class UnusedWith:
    """Options that do nothing beside another one.

    Args:
        options: They would do nothing.
        other: The option or positional argument that is the reason.
        why: What that one does.
    """

    options: tuple[str, ...]
    other: str
    why: str

    def refusal(self, option: str) -> tuple[str, str]:
        """Return message and hint."""
        message = f"{option} cannot be used with {self.other}: {self.why}"
        return message, "Leave one of them out."


@dataclass(frozen=True)
class UnusedWithout:
    """Options that do nothing unless one of others is given too.

    Args:
        options: They would do nothing.
        others: One of them is enough.
        why: What the options are for.
    """

    options: tuple[str, ...]
    others: tuple[str, ...]
    why: str

    def refusal(self, option: str) -> tuple[str, str]:
        """Return message and hint."""
        wanted = " or ".join(self.others)
        message = f"{option} cannot be used without {wanted}: {self.why}"
        return message, f"Add {wanted}, or leave {option} out."


_CHOSEN_IN_PANEL = "it is chosen in the panel"
_LIMIT = ("--store-limit-gb",)
_NO_PUBLISHING = "it adds no graph to the store and deletes none to make room"
_NO_PICTURE = "no picture is encoded or decoded"
HERE = (
    UnusedHere("warmup", ("--eager",), "there is nothing to warm up without graphs"),
    UnusedHere(
        "warmup",
        ("--build",),
        "a warm-up builds what is missing, and then measures",
        "Leave it out, or build nothing with --no-build.",
    ),
    UnusedHere("warmup", ("--vae-tiling",), _NO_PICTURE),
    UnusedHere("bench", ("--eager",), "it compares eager with compiled"),
    UnusedHere("bench", ("--vae-tiling",), _NO_PICTURE),
    UnusedHere(
        "demo",
        ("--gpus", "--cluster", "--graphs", "--trust", "--progress-json"),
        "the demo draws in one process",
        "Leave it out, or draw with img2img.",
    ),
    UnusedHere("demo", ("--captions",), "the demo always reads captions"),
    UnusedHere(
        "ui",
        ("--backend", "--precision", "--eager", "--ignore-vae", "--ignore"),
        _CHOSEN_IN_PANEL,
        "Choose it in the panel.",
    ),
    UnusedHere("ui", ("--vae",), "the page draws with the checkpoint's own VAE"),
    UnusedHere(
        "ui",
        ("--config",),
        "the page loads transformers from folders",
        "Start it with the diffusers folder.",
    ),
    UnusedHere(
        "graphs explain", ("--build", "--no-build", "--eager"), "graphs are loaded, none are built"
    ),
    UnusedHere("graphs explain", ("--vae-tiling",), _NO_PICTURE),
    *(
        UnusedHere(command, _LIMIT, _NO_PUBLISHING)
        for command in (
            "doctor",
            "graphs list",
            "graphs status",
            "graphs retry",
            "graphs verify",
            "graphs export",
        )
    ),
)
WITH = (
    UnusedWith(
        (
            "--backend",
            "--precision",
            "--ignore",
            "--ignore-vae",
            "--build",
            "--no-build",
            "--workers",
            "--cfg-parallel",
            "--store-limit-gb",
            "--graphs",
        ),
        "--eager",
        "nothing is compiled",
    ),
    UnusedWith(("--build",), "--no-build", "nothing is built"),
    UnusedWith(("--tune",), "--no-build", "nothing is built"),
    UnusedWith(("--tune",), "--gpus", "graphs are tuned in one process"),
    UnusedWith(("--tune",), "--cluster", "graphs are tuned in one process"),
    UnusedWith(("--cfg-parallel",), "--gpus", "each GPU draws pictures of its own"),
    UnusedWith(("--cfg-parallel",), "--cluster", "each GPU draws pictures of its own"),
    UnusedWith(
        ("--guidance-steps",), "--cfg-parallel", "the second GPU has the work that it leaves out"
    ),
    UnusedWith(_LIMIT, "--to-gb", "that is the size to shrink to"),
    UnusedWith(
        (
            "--model",
            "--config",
            "--vae",
            "--lora",
            "--device",
            "--dtype",
            "--backend",
            "--precision",
            "--ignore",
            "--ignore-vae",
            "--cfg-parallel",
            "--workers",
            "--store-limit-gb",
        ),
        "KEY",
        "a stored graph is explained without a checkpoint",
    ),
)
WITHOUT = (
    UnusedWithout(("--graphs",), ("--cluster", "--gpus"), "machines share graphs there"),
    UnusedWithout(("--progress-json",), ("--cluster", "--gpus"), "workers have this progress"),
    UnusedWithout(("--trust",), ("--graphs",), "it trusts those who write there"),
    UnusedWithout(("--most",), ("--from",), "it limits the sizes of that folder"),
    UnusedWithout(("--recursive",), ("FOLDER",), "the demo's own photographs have no subfolders"),
)


def name_of(action: argparse.Action) -> str:
    """Return an option's long name, or what the help calls a positional argument."""
    long = (name for name in action.option_strings if name.startswith("--"))
    return next(long, str(action.metavar or action.dest))


def unused_here(command: str) -> frozenset[str]:
    """Return the options that a command has no use for."""
    return frozenset(name for rule in HERE if rule.command == command for name in rule.options)


def refusals(
    command: str, known: Collection[str], given: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield message and hint for each given option that would do nothing.

    Args:
        command: Its words after ``onediff-ext``.
        known: Names of all arguments of the command, from `name_of`.
        given: Those that the user has written.
    """
    for here in HERE:
        if here.command == command:
            yield from (here.refusal(name) for name in here.options if name in given)
    for beside in WITH:
        if beside.other in given:
            yield from (beside.refusal(name) for name in beside.options if name in given)
    for alone in WITHOUT:
        if set(alone.others) & set(known) and not set(alone.others) & set(given):
            yield from (alone.refusal(name) for name in alone.options if name in given)
