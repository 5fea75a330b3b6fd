"""``python -m tools.check_targets``: compile kernels for GPUs that are not here.

Each variant of our Triton kernels that the shipped architectures use is compiled, not run, for
each generation. With ``--graphs`` the graphs of whole models are: the kernels that Inductor
generates for each kind of block. The table has what a program takes: shared memory, registers,
and bytes spilled out of registers. The exit status is 1 where a kernel does not compile or does
not fit. Needs Triton, but no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES
from benchmarks.results import write_result
from tools.check_targets.graphs import MODELS, GraphTarget, compiled_graphs
from tools.check_targets.kernels import compiled_variant, variants
from tools.check_targets.targets import SHARED_BYTES, Target

_TITLES = "capability  variants  shared, bytes  registers  spilled, bytes"


def main(arguments: list[str] | None = None) -> int:
    """Compile all, print a table, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.check_targets", description=__doc__)
    parser.add_argument(
        "--capability", type=int, action="append", choices=SHARED_BYTES, help="only this one"
    )
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument(
        "--graphs",
        nargs="*",
        choices=MODELS,
        help="the graphs of these models, or of all, instead of our own kernels",
    )
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16", help="of graphs")
    given = parser.parse_args(arguments)
    if (missing := _missing(given.graphs is not None)) is not None:
        parser.error(missing)
    wanted = given.capability or list(SHARED_BYTES)
    if given.graphs is None:
        return _check_kernels(wanted, given.json)
    return _check_graphs(given.graphs or list(MODELS), given.dtype, wanted, given.json)


def _missing(graphs: bool) -> str | None:
    """Say what this environment lacks, and what to do."""
    if graphs and torch.version.cuda is None:
        return (
            "--graphs needs torch for CUDA, and no GPU: pip install torch, in another environment"
        )
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed: pip install triton, or use an environment with torch for CUDA"
        )
    return None


def _check_kernels(wanted: list[int], json: Path | None) -> int:
    found = [
        compiled_variant(variant, capability)
        for variant, capability in itertools.product(variants(), wanted)
        if capability >= variant.since
    ]
    print(f"{'kernel':<25} {_TITLES}")
    by_kernel: dict[tuple[str, int], list[Target]] = {}
    for target in found:
        by_kernel.setdefault((target.kernel, target.capability), []).append(target)
    for (kernel, capability), targets in sorted(by_kernel.items()):
        print(f"{kernel:<25} {_line(capability, targets)}")
    failed = [f"{t.kernel}, {t.label}, {t.capability}: {t.error}" for t in found if t.error]
    what = "our Triton kernels compiled for each generation of GPUs, not run"
    return _end(failed, json, what, [asdict(target) for target in found])


def _check_graphs(models: list[str], dtype: str, wanted: list[int], json: Path | None) -> int:
    found: list[GraphTarget] = []
    for graph in compiled_graphs(models, DTYPES[dtype], wanted):
        found.append(graph)
        print(f"{graph.model}: {graph.label}, {_number(graph.capability)}", file=sys.stderr)
    print(f"{'model':<16} {_TITLES}  graphs")
    by_model: dict[tuple[str, int], list[GraphTarget]] = {}
    for graph in found:
        by_model.setdefault((graph.model, graph.capability), []).append(graph)
    for (model, capability), graphs in by_model.items():
        kernels = [kernel for graph in graphs for kernel in graph.kernels]
        print(f"{model:<16} {_line(capability, kernels)} {len(graphs):>7}")
    print("PyTorch's own:", ", ".join(sorted({name for g in found for name in g.operators})))
    failed = [
        f"{graph.model}, {graph.label}, {graph.capability}: {error}"
        for graph in found
        for error in (graph.error, *(kernel.error for kernel in graph.kernels))
        if error
    ]
    what = f"graphs in {dtype} compiled for each generation of GPUs, not run"
    return _end(failed, json, what, [_row(graph) for graph in found])


def _row(graph: GraphTarget) -> dict[str, Any]:
    return {
        "model": graph.model,
        "kind": graph.label,
        "capability": graph.capability,
        "kernels": len(graph.kernels),
        "most_shared_bytes": _most(graph.kernels, "shared_bytes"),
        "most_registers": _most(graph.kernels, "registers"),
        "spilled_bytes": {k.kernel: k.spilled_bytes for k in graph.kernels if k.spilled_bytes},
        "operators": list(graph.operators),
        "errors": [e for e in (graph.error, *(k.error for k in graph.kernels)) if e],
    }


def _most(targets: Iterable[Target], name: str) -> int:
    return max((getattr(target, name) for target in targets), default=0)


def _line(capability: int, targets: list[Target]) -> str:
    shared, registers, spilled = (
        _most(targets, name) for name in ("shared_bytes", "registers", "spilled_bytes")
    )
    return (
        f"{_number(capability):>10} {len(targets):>9} {shared:>14,} {registers:>10} {spilled:>15,}"
    )


def _number(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _end(failed: list[str], json: Path | None, what: str, rows: list[dict[str, Any]]) -> int:
    for line in failed:
        print(f"NO {line}")
    if json is not None:
        made_on = fingerprint(torch.device("cpu"))
        write_result(json, {"what": what, "fingerprint": made_on, "rows": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
