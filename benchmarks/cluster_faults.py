"""A Ray cluster of several nodes in one machine, whose workers are killed while they draw."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.cluster_nodes import NodeProgram
from onediff_ext.cli import cluster_run, img2img
from onediff_ext.cli.cluster_arguments import make_paths_absolute
from onediff_ext.cli.model_identity import model_identity
from onediff_ext.cluster.coordinator import Coordinator, WorkerState
from onediff_ext.cluster.ray_pool import RayPool

ROOT = Path(__file__).resolve().parents[1]
_STORE_BYTES = 100 * 2**20


def make_pictures(folder: Path, count: int, sizes: int) -> None:
    """Make pictures of noise in different sizes, whose bytes are always the same."""
    folder.mkdir(parents=True)
    random_bytes = random.Random(7).randbytes
    for number in range(count):
        width_px, height_px = 64 + 8 * (number % sizes), 64 + 8 * (number % 3)
        noise = Image.frombytes("RGB", (16, 16), random_bytes(16 * 16 * 3))
        picture = noise.resize((width_px, height_px), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number:05d}.png")


def run_with_faults(
    nodes: int,
    pictures: int,
    sizes: int,
    kills: int,
    *,
    seed: int = 0,
    lose_node: bool = True,
    model: Path | None = None,
    filled: Path | None = None,
) -> dict[str, Any]:
    """Draw a folder on a cluster with faults, and once more in one process without.

    Args:
        nodes: Nodes with one worker each; one is lost on the way and another one joins.
        pictures: Number of pictures.
        sizes: Number of sizes.
        kills: Workers that are killed at random moments.
        seed: Of these moments.
        lose_node: Whether a node is lost and one joins.
        model: A checkpoint; None takes the demo's.
        filled: A store that each node begins with a copy of; None for empty ones.
    """
    with tempfile.TemporaryDirectory(prefix="onediff-cluster-") as name:
        return _run(Path(name), nodes, pictures, sizes, kills, seed, lose_node, model, filled)


def _run(
    folder: Path,
    nodes: int,
    pictures: int,
    sizes: int,
    kills: int,
    seed: int,
    lose_node: bool,
    model: Path | None,
    filled: Path | None,
) -> dict[str, Any]:
    make_pictures(folder / "in", pictures, sizes)
    log = folder / "written.log"
    arguments = faults_arguments(folder / "in", folder / "cluster", folder / "store", model)
    start = time.monotonic()
    with NodesOfOneMachine(nodes) as machine:
        arguments.cluster = machine.address
        faults = _Faults(machine, kills, pictures, seed, lose_node)
        report, skipped = _draw_on_cluster(arguments, log, filled, faults)
        seconds = time.monotonic() - start
        builds = faults.builds()
    written = Counter(log.read_text().splitlines())
    found = sorted(path for path in (folder / "cluster").rglob("*") if path.is_file())
    one = _draw_in_one_process(folder, model)
    inputs = sorted(path.name for path in (folder / "in").iterdir())
    names = [path.name for path in found]
    equal = all(
        path.read_bytes() == (one / path.name).read_bytes()
        for path in found
        if path.suffix == ".png"
    )
    joined = [row for row in report.workers if not row["lost"] and row["ready_seconds"]]
    result: dict[str, Any] = {
        "nodes": nodes,
        "pictures": pictures,
        "sizes": sizes,
        "killed": faults.killed,
        "nodes_lost": faults.lost_nodes,
        "nodes_joined": faults.joined_nodes,
        "pictures_written": sum(name in inputs for name in names),
        "lost": len(set(inputs) - set(names)),
        "duplicates": sum(count - 1 for count in written.values())
        + sum(name not in inputs for name in names),
        "skipped": [str(entry) for entry in skipped],
        "equal_to_one_worker": equal and names == inputs,
        "builds_of_each_kind": max(builds.values(), default=0),
        "kinds_built": len(builds),
        "processes_left": _processes_left(machine.session_folder),
        "seconds": seconds,
        "last_worker_ready_seconds": joined[-1]["ready_seconds"] if joined else None,
        "workers": [{**row, "lost": bool(row["lost"]), "host": ""} for row in report.workers],
    }
    result["ok"] = (
        result["pictures_written"] == pictures
        and not result["lost"]
        and not result["duplicates"]
        and result["equal_to_one_worker"]
        and result["builds_of_each_kind"] <= 1
        and not result["processes_left"]
    )
    return result


class NodesOfOneMachine:
    """Nodes of one Ray cluster, each a set of processes of this machine with room for a worker."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.session_folder = ""

    def __enter__(self) -> NodesOfOneMachine:
        from onediff_ext.cluster.ray_library import import_ray

        import_ray()
        os.environ["PYTHONPATH"] = str(ROOT)  # the workers' programs are in this package
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.add() for _ in range(self._count - 1)]
        self.address = self._cluster.address
        head_node: Any = self._cluster.head_node
        self.session_folder = head_node.get_session_dir_path()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cluster.shutdown()

    def add(self) -> Any:
        """Let a node join; its workers come later."""
        return self._cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES, wait=False)

    def lose(self) -> None:
        """Kill a node without a goodbye, but not the one that the driver talks to."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        sockets = {node["ObjectStoreSocketName"]: node["NodeID"] for node in ray.nodes()}
        victim = next(n for n in self.others if sockets[n.plasma_store_socket_name] != own)
        self.others.remove(victim)
        self._cluster.remove_node(victim, allow_graceful=False)


class _Faults:
    """Kills workers when randomly chosen numbers of pictures are done."""

    def __init__(
        self, machine: NodesOfOneMachine, kills: int, pictures: int, seed: int, lose_node: bool
    ) -> None:
        self._machine, self._random = machine, random.Random(seed)
        moments = [self._random.uniform(0.05, 0.5) * pictures for _ in range(kills)]
        self._kill_at = sorted(moments)
        self._node_at = self._random.uniform(0.2, 0.5) * pictures if lose_node else None
        self.killed = self.lost_nodes = self.joined_nodes = 0
        self.workers: list[WorkerState] = []

    def watch(self, _pool: RayPool, coordinator: Coordinator) -> None:
        """Called by the driver in every round."""
        done = sum(worker.pictures for worker in coordinator.workers)
        alive = [w for w in coordinator.workers if w.is_ready and not w.lost]
        if self._kill_at and done >= self._kill_at[0] and alive:
            victim = self._random.choice(alive)
            # One that died with its machine is no kill; the next round takes another.
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.about["pid"], signal.SIGKILL)
                del self._kill_at[0]
                self.killed += 1
        if self._node_at is not None and done >= self._node_at:
            self._node_at = None
            self._machine.lose()
            self.lost_nodes += 1
            self._machine.others.append(self._machine.add())
            self.joined_nodes += 1
        self.workers = coordinator.workers

    def builds(self) -> Counter[str]:
        """How many workers built each kind."""
        return Counter(digest for w in self.workers for digest in w.about.get("built_kinds", ()))


def faults_arguments(
    inputs: Path, output: Path, store: Path, model: Path | None
) -> argparse.Namespace:
    """Return the arguments of an img2img that waits for its graphs, its paths absolute."""
    parser = argparse.ArgumentParser()
    img2img.add_arguments(parser)
    arguments = parser.parse_args(_options(store, model))
    arguments.inputs, arguments.output = [inputs], output
    make_paths_absolute(arguments)
    return arguments


def _options(store: Path, model: Path | None) -> list[str]:
    # A graph's rounding is not eager's, so equal pictures need a run that waits for its graphs.
    options = "--steps 2 --strength 1 --backend eager --build wait --batch-size 2 --workers 2"
    named = [] if model is None else ["--model", str(model)]
    return [*options.split(), "--ignore-vae", "--store", str(store), *named]


def _draw_on_cluster(
    arguments: argparse.Namespace, log: Path, filled: Path | None, faults: _Faults
) -> tuple[Any, Any]:
    from onediff_ext.hosts.diffusers.jobs.img2img_job import plan_job
    from onediff_ext.hosts.diffusers.jobs.run_report import RunReport
    from onediff_ext.pictures.skipped import SkipReport

    report, skipped = RunReport(), SkipReport()
    job = img2img.make_job(arguments, model_identity(arguments))
    plan = plan_job(job, skipped)
    plan.make_folders()
    log.touch()
    cluster_run.run_img2img_on_workers(
        arguments,
        job,
        plan,
        report,
        skipped,
        faults.watch,
        lambda program: NodeProgram(program, log, filled),
    )
    return report, skipped.failures


def _draw_in_one_process(folder: Path, model: Path | None) -> Path:
    stores = sorted(folder.glob("store-*"), key=lambda store: len(list(store.rglob("*.graph"))))
    command = [sys.executable, "-m", "onediff_ext", "img2img", str(folder / "in")]
    command += ["-o", str(folder / "one"), *_options(stores[-1], model)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return folder / "one"


def _processes_left(session_folder: str) -> int:
    """Processes of this Ray session, and workers of its workers, that still live."""
    time.sleep(1.0)
    left = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            left += bool(session_folder) and session_folder in command + environment
    return left
