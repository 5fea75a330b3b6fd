"""Arguments of the commands that can use several GPUs: ``--gpus``, ``--cluster``, ``--graphs``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from onediff_ext.cli.argument_types import named_path


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of several GPUs and machines."""
    group = parser.add_argument_group("several GPUs")
    group.add_argument(
        "--gpus",
        type=_gpus,
        metavar="all|N",
        help="draw on all GPUs of this machine, or on N; without a GPU, in N processes",
    )
    group.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="draw on all GPUs of a Ray cluster, such as 10.0.0.1:6379 or auto; --gpus N takes N",
    )
    group.add_argument(
        "--graphs",
        type=_graphs,
        metavar="URL",
        help="folder or URL (s3://…) where the machines share graphs (default: over Ray)",
    )
    group.add_argument(
        "--trust",
        action="store_true",
        help="trust everybody who can write to --graphs: graphs are native code",
    )
    # For the stand-alone page: a line of JSON on the standard output now and then.
    group.add_argument("--progress-json", action="store_true", help=argparse.SUPPRESS)


def prepare_workers(arguments: argparse.Namespace) -> bool:
    """Return whether the command runs in workers, and make its arguments ready for them."""
    if arguments.gpus is None and arguments.cluster is None:
        return False
    make_paths_absolute(arguments)
    _make_environment_absolute()
    return True


def worker_limit(arguments: argparse.Namespace) -> int | None:
    """Return the most workers; None for all."""
    return None if arguments.gpus in (None, "all") else int(arguments.gpus)


def make_paths_absolute(arguments: argparse.Namespace) -> None:
    """Workers have other current folders: make each path of the command line absolute."""
    from onediff_ext.hosts.diffusers.lora.lora_option import parse_lora

    for name in ("model", "config", "vae", "store", "output", "report", "json"):
        path = getattr(arguments, name, None)
        if path is not None:
            setattr(arguments, name, path.absolute())
    if hasattr(arguments, "inputs"):
        arguments.inputs = [path.absolute() for path in arguments.inputs]
    loras = [parse_lora(text) for text in arguments.lora]
    arguments.lora = [f"{path.absolute()}:{weight!r}" for path, weight in loras]
    if arguments.graphs is not None and "://" not in arguments.graphs:
        arguments.graphs = str(Path(arguments.graphs).absolute())


def _make_environment_absolute() -> None:
    """The same for the environment, which the workers of this machine inherit."""
    from onediff_ext.store.default_root import ROOT_VARIABLE
    from onediff_ext.store.permissions import TRUST_VARIABLE

    for name in (ROOT_VARIABLE, TRUST_VARIABLE):
        value = os.environ.get(name, "")
        if value and not value.startswith("~"):
            os.environ[name] = os.path.abspath(value)


def _graphs(text: str) -> str:
    """Read a folder or URL of graphs, for argparse."""
    named_path(text)
    return text


def _gpus(text: str) -> str:
    """Read ``all`` or a number of at least 1, for argparse."""
    if text != "all" and not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither all nor a number of GPUs")
    return text
