"""Arguments of every command with a checkpoint: model, compilation and graph store."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from onediff_ext.cli.argument_types import folder_path, positive_amount, positive_count
from onediff_ext.core.demo_files import DEMO_MODEL
from onediff_ext.core.options import (
    BACKENDS,
    BUILD_POLICIES,
    COMPONENTS,
    PRECISIONS,
    CompileOptions,
    parse_ignores,
)

_DTYPES = ("auto", "fp32", "fp16", "bf16")
_VAE_TILING = ("auto", "on", "off")


def add_store_arguments(
    parser: argparse.ArgumentParser, *, path: Callable[[str], Path] = folder_path
) -> None:
    """Add the options of the graph store.

    Args:
        parser: Of a command.
        path: Reads the folder's path; `doctor` takes any and says what is wrong with it.
    """
    group = parser.add_argument_group("graph store")
    group.add_argument(
        "--store",
        type=path,
        help="folder of the graph store (default: $ONEDIFF_STORE, or the user's cache)",
    )
    group.add_argument(
        "--store-limit-gb",
        type=positive_amount,
        default=CompileOptions.store_limit_bytes / 2**30,
        help="delete the least recently used graphs above this size (default: %(default)g)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add checkpoint, device, compile and store options."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        type=Path,
        default=DEMO_MODEL,
        help=".safetensors checkpoint or diffusers folder (default: the demo model)",
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="FOLDER",
        help="diffusers folder of the same model, for a file that has only the weights of a"
        " transformer such as Flux.1: its text encoders and VAE are used",
    )
    group.add_argument(
        "--vae",
        type=Path,
        help="VAE .safetensors in place of the checkpoint's own",
    )
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:WEIGHT]",
        help="LoRA .safetensors, may be given several times",
    )
    group.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto, a GPU if any)"
    )
    group.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="auto",
        help="of the weights (default: auto, which is fp32 on CPUs and fp16 on GPUs; bf16 for"
        " transformers on GPUs that compute in it)",
    )
    group.add_argument(
        "--vae-tiling",
        choices=_VAE_TILING,
        default="auto",
        help="encode and decode in overlapping tiles, which changes a picture a little; auto: only"
        " what would not fit into memory otherwise (default: auto)",
    )
    compile_group = parser.add_argument_group("compilation")
    compile_group.add_argument(
        "--backend",
        choices=BACKENDS,
        default=CompileOptions.backend,
        help="the compiler that builds graphs (default: %(default)s)",
    )
    compile_group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=CompileOptions.precision,
        help="of linear layers: fp8 and int8 are faster on GPUs that have them, and change pictures"
        " a little (default: exact, which is as without OneDiff)",
    )
    compile_group.add_argument("--eager", action="store_true", help="compile nothing at all")
    compile_group.add_argument("--ignore-vae", action="store_true", help="leave the VAE eager")
    compile_group.add_argument(
        "--ignore",
        action="append",
        default=[],
        choices=COMPONENTS,
        help="leave this part eager, may be given several times",
    )
    compile_group.add_argument(
        "--build",
        choices=BUILD_POLICIES,
        help="missing graphs: build beside the pictures (background), before them (wait), or not"
        " at all (default: background; bench and demo wait)",
    )
    compile_group.add_argument("--no-build", action="store_true", help="use stored graphs only")
    compile_group.add_argument(
        "--cfg-parallel",
        nargs="?",
        const="auto",
        default=CompileOptions.cfg_parallel,
        metavar="DEVICE",
        help="draw each picture on two GPUs, one for the negative prompt; cuda:1 names the other"
        " one (default: off)",
    )
    compile_group.add_argument(
        "--workers",
        type=positive_count,
        help="build processes at the same time (default: half of the cores, 2 to 8)",
    )
    add_store_arguments(parser)


def parse_options(arguments: argparse.Namespace) -> CompileOptions:
    """Return the compile options of the command line.

    Raises:
        OptionError: A value cannot be used.
    """
    return CompileOptions(
        backend=arguments.backend,
        precision=arguments.precision,
        build="never" if arguments.no_build else (arguments.build or CompileOptions.build),
        store=arguments.store,
        store_limit_bytes=int(arguments.store_limit_gb * 2**30),
        workers=arguments.workers,
        cfg_parallel=arguments.cfg_parallel,
    )


def parse_ignored_components(arguments: argparse.Namespace) -> frozenset[str]:
    """Return the components of ``--ignore`` and ``--ignore-vae``, which stay eager."""
    return parse_ignores([*arguments.ignore, *(["vae"] if arguments.ignore_vae else [])])
