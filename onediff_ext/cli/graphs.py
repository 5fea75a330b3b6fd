"""``onediff-ext graphs``: list, explain, check, prune and move the graphs of the store."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.cli.argument_types import amount
from onediff_ext.cli.model_arguments import add_model_arguments, add_store_arguments
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cli.model_loading import load_model
from onediff_ext.cli.tables import format_table
from onediff_ext.core.errors import OptionError
from onediff_ext.core.words import counted, printable

if TYPE_CHECKING:
    from onediff_ext.store import GraphLibrary, StoredGraph


_HOW_TO_BUILD = "Draw a picture, or run `onediff-ext warmup`."


def add_parser(commands: Any) -> None:
    """Register the command and its actions."""
    parser = commands.add_parser("graphs", help="list, explain, check, prune and move graphs")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action, text in (
        ("list", _list, "graphs and the checkpoints that use them"),
        ("explain", _explain, "what a graph was built for, or what a checkpoint lacks and why"),
        ("status", _status, "how many graphs of each checkpoint are ready, failed, being built"),
        ("retry", _retry, "try again what could not be built"),
        ("verify", _verify, "check every file's checksum"),
        ("prune", _prune, "delete the least recently used graphs"),
        ("export", _export, "write graphs into an archive"),
        ("import", _import, "take graphs from an archive (native code: needs --trust)"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        if name == "explain":
            sub.add_argument(
                "graph", nargs="?", metavar="KEY", help="first digits of a graph's key"
            )
            add_model_arguments(sub)
        else:
            add_store_arguments(sub)
        if name == "status":
            sub.add_argument("--json", action="store_true", help="print JSON")
            sub.add_argument("--checkpoint", help="name of the only checkpoint to show")
        if name == "verify":
            sub.add_argument("--repair", action="store_true", help="delete damaged graphs")
        if name == "prune":
            sub.add_argument("--to-gb", type=amount, help="delete until the store has this size")
            sub.add_argument(
                "--older-than-days", type=amount, help="delete what was not used for so many days"
            )
            sub.add_argument(
                "--other-versions", action="store_true", help="also delete graphs of other versions"
            )
        if name in ("export", "import"):
            sub.add_argument("file", type=Path, help=f"the archive to {name}")
        if name == "export":
            sub.add_argument("--checkpoint", help="name of the checkpoint whose graphs to export")
        if name == "import":
            sub.add_argument(
                "--trust",
                action="store_true",
                help="trust the archive's author: its graphs are native code that runs here",
            )
        sub.set_defaults(run=action)


def _library(arguments: argparse.Namespace) -> GraphLibrary:
    from onediff_ext.store import GraphLibrary, default_root

    root = arguments.store or default_root()
    return GraphLibrary(root, int(arguments.store_limit_gb * 2**30))


def _list(arguments: argparse.Namespace) -> int:
    from onediff_ext.store import CheckpointRecords

    library = _library(arguments)
    entries = library.entries()
    users: dict[str, list[str]] = {}
    listings = CheckpointRecords(library.folder).list()
    for listing in listings:
        for digest in listing.record.kinds:
            users.setdefault(digest, []).append(listing.record.name)
    rows = [_row(graph, users.get(graph.digest, [])) for graph in entries]
    header = ["graph", "kind", "backend", "device", "MB", "built in s", "last use", "used by"]
    print(format_table(header, rows) if rows else f"No graphs yet. {_HOW_TO_BUILD}")
    if any(graph.header.backend == "oneflow" for graph in entries):
        print("\nOneFlow's graphs are kept as programs: each process plans each new size again.")
    total = sum(graph.size_bytes for graph in entries)
    print(f"\n{counted(len(entries), 'graph')}, {total / 1e6:.1f} MB in {library.folder.root}")
    for listing in listings:
        record = listing.record
        missing = f", {len(listing.missing)} no longer stored" if listing.missing else ""
        whose = f"{record.name} ({record.architecture})"
        print(printable(f"{whose}: {counted(len(record.kinds), 'kind')}{missing}"))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    """Print each checkpoint's status from the store, also while another process builds."""
    import json

    import torch

    from onediff_ext.core.options import CompileOptions
    from onediff_ext.core.status import STATUS_SCHEMA
    from onediff_ext.session.stored_status import stored_status
    from onediff_ext.store import CheckpointRecords

    library = _library(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    records = [seen.record for seen in CheckpointRecords(library.folder).list()]
    if arguments.checkpoint is not None:
        records = [record for record in records if record.name == arguments.checkpoint]
        if not records:
            raise OptionError(
                f"No checkpoint {arguments.checkpoint!r}.", "See `onediff-ext graphs list`."
            )
    found = [(r, stored_status(library, r, device, CompileOptions())) for r in records]
    if arguments.json:
        described = [
            {
                "name": record.name,
                "content_hash": record.content_hash,
                "architecture": record.architecture,
                **status.as_json(),
            }
            for record, status in found
        ]
        store = str(library.folder.root)
        print(json.dumps({"schema": STATUS_SCHEMA, "store": store, "checkpoints": described}))
        return 0
    for record, status in found:
        print(printable(f"{record.name} ({record.architecture}): {status.line()}"))
        for reason in status.reasons:
            print(printable(f"  eager for good: {reason}"))
        if status.pays_off_after is not None:
            pictures = counted(status.pays_off_after, "picture")
            print(f"  the builds pay off after {pictures} of 20 steps")
    if not found:
        print(f"No checkpoint has been used yet. {_HOW_TO_BUILD}")
    return 0


def _retry(arguments: argparse.Namespace) -> int:
    from onediff_ext.store import BuildRecords

    forgotten = BuildRecords(_library(arguments).folder).retry()
    for label in forgotten:
        print(printable(f"{label}: built at its next use"))
    print(f"{counted(len(forgotten), 'kind')} to try again")
    return 0


def _row(graph: StoredGraph, users: list[str]) -> list[str]:
    entries = graph.key.entries
    return [
        graph.digest[:12],
        graph.label,
        graph.header.backend,
        entries.get("device", "?"),
        f"{graph.size_bytes / 1e6:.1f}",
        f"{graph.header.build_seconds:.1f}",
        _ago(time.time() - graph.last_used_at),
        ", ".join(users) or "-",
    ]


def _explain(arguments: argparse.Namespace) -> int:
    if arguments.graph is not None:
        return _explain_graph(_library(arguments), arguments.graph)
    # Nothing is built: the block kinds of the checkpoint, and why a graph is missing.
    arguments.no_build = True
    identity = model_identity(arguments)
    model = load_model(arguments, identity)
    assert model.session is not None
    for kind in model.session.kinds:
        blocks = counted(len(kind.blocks), "block")
        if kind.graph is not None:
            loaded = f"loaded, {blocks} ({kind.key.digest[:12]})"
            print(printable(f"{kind.label}: {loaded}"))
        else:
            why = kind.reason or model.session.build_context.graph_trust.missing_reason(kind)
            print(printable(f"{kind.label}: missing, {blocks}: {why}"))
    return 0


def _explain_graph(library: GraphLibrary, prefix: str) -> int:
    found = [graph for graph in library.entries() if graph.digest.startswith(prefix.lower())]
    if len(found) != 1:
        what = "No graph" if not found else f"{len(found)} graphs"
        raise OptionError(f"{what} begins with {prefix!r}.", "See `onediff-ext graphs list`.")
    from onediff_ext.store import BuildRecords

    graph = found[0]
    print(printable(f"{graph.label} ({graph.digest})"))
    for name, value in sorted(graph.key.entries.items()):
        print(printable(f"  {name}: {value}"))
    print(f"  origin: {graph.header.origin}, {graph.header.build_seconds:.1f} s to build")
    for load_check in BuildRecords(library.folder).read(graph.digest).load_checks.values():
        result = load_check.problem or "passed, with results like eager"
        print(printable(f"  load check: {result}"))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from onediff_ext.store.verification import DAMAGED, MISPLACED

    library = _library(arguments)
    problems = library.verify(repair=arguments.repair)
    for problem in problems:
        remedy = f" ({problem.remedy})" if problem.remedy else ""
        print(printable(f"{problem.path.name}: {problem.reason}{remedy}"))
    bad = {problem.path for problem in problems}
    sound = sum(graph.path not in bad for graph in library.entries())
    states = Counter({DAMAGED: 0})
    states.update(problem.state for problem in problems)
    print(", ".join([f"{sound} sound", *(f"{n} {state}" for state, n in states.items())]))
    if states[DAMAGED] and not arguments.repair:
        print("Run `onediff-ext graphs verify --repair` to delete those; they are built again.")
    if states[MISPLACED] and not arguments.repair:
        print("Run `onediff-ext graphs verify --repair` to move graphs back to their place.")
    return 1 if any(not problem.remedy for problem in problems) else 0


def _prune(arguments: argparse.Namespace) -> int:
    days = arguments.older_than_days
    report = _library(arguments).prune(
        limit_bytes=None if arguments.to_gb is None else int(arguments.to_gb * 2**30),
        older_than_s=None if days is None else days * 86400,
        other_versions=arguments.other_versions,
    )
    print(
        f"{counted(len(report.digests), 'graph')} deleted, {report.freed_bytes / 1e6:.1f} MB freed"
    )
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from onediff_ext.store import CheckpointRecords

    library = _library(arguments)
    digests = None
    if arguments.checkpoint is not None:
        listings = CheckpointRecords(library.folder).list()
        chosen = [seen for seen in listings if seen.record.name == arguments.checkpoint]
        if not chosen:
            names = ", ".join(seen.record.name for seen in listings) or "none yet"
            raise OptionError(f"No checkpoint {arguments.checkpoint!r}.", f"Known: {names}.")
        digests = sorted({d for seen in chosen for d in seen.record.kinds if d not in seen.missing})
    if not os.path.isdir(arguments.file.absolute().parent):
        raise OptionError(
            f"There is no folder {arguments.file.parent}.", "Name another, or make it."
        )
    count = library.export(arguments.file, digests)
    written = f"{counted(count, 'graph')} in {arguments.file}"
    print(f"{written}. Graphs are native code for this kind of machine.")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    report = _library(arguments).import_archive(arguments.file, trust=arguments.trust)
    imported = counted(len(report.imported), "graph")
    print(f"{imported} imported, {len(report.kept)} already in the store")
    return 0


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
