"""``onediff-ext doctor``: checks of this machine, each failure with its remedy."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onediff_ext.cli.argument_types import named_path
from onediff_ext.cli.model_arguments import add_store_arguments
from onediff_ext.core.words import counted, printable

if TYPE_CHECKING:
    from onediff_ext.store import GraphLibrary


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("doctor", help="say what works here and what to do about the rest")
    add_store_arguments(parser, path=named_path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line for each check; 1 when a check fails."""
    worst = 0
    for ok, line in _findings(arguments):
        print(printable(f"{'ok ' if ok else 'NO '} {line}"))
        worst = max(worst, 0 if ok else 1)
    return worst


def _findings(arguments: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    version = sys.version_info
    yield (3, 10) <= version < (3, 14), f"Python {version.major}.{version.minor}.{version.micro}"
    try:
        import torch
    except ImportError:
        yield False, "torch is missing: run `python install.py demo` once"
        return
    from onediff_ext.backends.registry import make_backend, no_graphs_reason

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    name = torch.cuda.get_device_name() if has_gpu else f"CPU, {torch.get_num_threads()} threads"
    yield True, f"torch {torch.__version__} on {name}"
    if has_gpu:
        from onediff_ext.core.gpu_advice import memory_advice

        yield True, memory_advice(torch.cuda.get_device_properties(device).total_memory)
    else:
        yield True, "no GPU: pictures are drawn on the CPU, where graphs gain little"
    reason = no_graphs_reason(device)
    yield reason is None, f"graphs by inductor: {reason or 'available'}"
    if has_gpu:
        yield from _flash_attention(device)
    reason = make_backend("oneflow").unavailable_reason(device)
    yield True, f"oneflow backend, which is optional: {reason or 'available'}"
    if not has_gpu:
        yield _compiler(os.name == "nt")
    for package in ("diffusers", "transformers", "peft", "PIL"):
        yield _importable(package)
    yield from _store_findings(arguments)


def _flash_attention(device: Any) -> Iterator[tuple[bool, str]]:
    """Say whether self-attention can be faster here."""
    from onediff_ext.backends.inductor import flash_attention

    found = flash_attention.version(device)
    if found is not None:
        yield True, f"faster self-attention: {flash_attention.PACKAGE} {found}"
    elif flash_attention.is_for(device):
        yield True, f"faster self-attention, which is optional: {flash_attention.INSTALL}"


def _compiler(windows: bool) -> tuple[bool, str]:
    """Look for the C++ compiler that Inductor would use."""
    names = (os.environ.get("CXX", "cl"),) if windows else ("g++", "clang++")
    found = next((path for name in names if (path := shutil.which(name))), None)
    hint = (
        "start from the prompt of Visual Studio's Build Tools, in English"
        if windows
        else "install one (Debian: apt install g++)"
    )
    missing = f"none: {hint}; stored graphs load without"
    return found is not None, f"C++ compiler: {found or missing}"


def _importable(package: str) -> tuple[bool, str]:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        hint = "run `pip install 'onediff-ext[diffusers]'`, or `python install.py demo`"
        return False, f"{package} is missing: {hint}"
    return True, package


def _store_findings(arguments: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    from onediff_ext.core.errors import StoreError
    from onediff_ext.store import GraphLibrary, default_root

    root = arguments.store or default_root()
    library = GraphLibrary(root, int(arguments.store_limit_gb * 2**30))
    try:
        library.folder.prepare()
    except StoreError as exc:
        yield False, f"graph store: {exc}"
        return
    if not os.access(library.folder.graphs, os.W_OK):
        yield (
            False,
            (
                f"graph store {root} cannot be written: new graphs are not kept. Make the folder"
                " writable, or name another one with --store or ONEDIFF_STORE"
            ),
        )
    entries = library.entries()
    used = sum(graph.size_bytes for graph in entries)
    free = shutil.disk_usage(library.folder.root).free
    yield True, f"graph store {root}: {counted(len(entries), 'graph')}, {used / 1e6:.0f} MB"
    hint = "" if free > 2**30 else ": free at least 1 GB, or name another folder with --store"
    yield not hint, f"free disk space: {free / 1e9:.1f} GB{hint}"
    seconds = [graph.header.build_seconds for graph in entries]
    if seconds:
        yield True, f"a graph took {sum(seconds) / len(seconds):.1f} s to build here, on average"
    yield from _gains(library)


def _gains(library: GraphLibrary) -> Iterator[tuple[bool, str]]:
    """Yield each checkpoint's measured speed-up, and the failed builds."""
    import torch

    from onediff_ext.core.options import CompileOptions
    from onediff_ext.session.stored_status import stored_status
    from onediff_ext.store import BuildRecords, CheckpointRecords

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for listing in CheckpointRecords(library.folder).list():
        status = stored_status(library, listing.record, device, CompileOptions())
        if status.speedup is None:
            gain = "not measured; `onediff-ext warmup` does"
        elif status.pays_off_after is None:
            gain = f"{status.speedup:.2f}x measured: graphs save nothing here"
        else:
            gain = (
                f"{status.speedup:.2f}x measured; its builds pay off after"
                f" {counted(status.pays_off_after, 'picture')} of 20 steps"
            )
        yield (
            True,
            f"{listing.record.name}: {status.kinds_ready} of {status.kinds_needed} graphs, {gain}",
        )
    for build_record in BuildRecords(library.folder).failures():
        reason = build_record.failure.reason if build_record.failure else ""
        yield False, f"{build_record.label} runs eager: {reason} (`onediff-ext graphs retry`)"
