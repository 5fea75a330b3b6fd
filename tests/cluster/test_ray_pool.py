"""Workers as Ray actors: each picture once, whatever dies, and nothing stays behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra cluster is not installed")

import onediff_ext
from onediff_ext.cluster import ray_library
from onediff_ext.cluster.batch_queue import BatchQueue, Poisoned
from onediff_ext.cluster.coordinator import Coordinator, start_all
from onediff_ext.cluster.program import Program
from onediff_ext.cluster.ray_graphs import RayGraphs
from onediff_ext.cluster.ray_pool import RayPool, missing_package
from onediff_ext.core.errors import CheckpointError, ClusterError, OptionError, PictureError
from onediff_ext.store import GraphExchange
from tests.support.number_program import NumberProgram
from tests.support.systems import skip_without_rays_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    skip_without_rays_names()
    # Workers import the tests from the checkout: the package's folder is on their path.
    with ray_library.connected(None, 2) as connected:
        yield connected


def run(ray: Any, program: NumberProgram, sizes: list[int]) -> tuple[Coordinator, list[Poisoned]]:
    poisoned: list[Poisoned] = []
    pool = RayPool(ray, program)
    coordinator = Coordinator(
        BatchQueue(sizes, [4] * len(sizes)),
        pool,
        lambda unit: unit,
        lambda unit, outcome, worker: report(program, outcome),
        lambda picture, reason: poisoned.append(picture),
        worker_limit=2,
    )
    try:
        coordinator.run()
    finally:
        pool.close()
    return coordinator, poisoned


def report(program: NumberProgram, outcome: tuple[list[Path], dict[str, Any]]) -> None:
    if program.reported is not None:
        for path in outcome[0]:
            (program.reported / path.name).touch()


def prepare_a_file(folder: Path) -> None:
    (folder / f"prepared-{os.getpid()}").touch()


def package_file() -> str:
    import onediff_ext

    return onediff_ext.__file__


def wait_until(holds: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def lines_of(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text().splitlines()) for path in folder.iterdir()}


def test_two_workers_write_each_picture_once(ray: Any, tmp_path: Path) -> None:
    coordinator, poisoned = run(ray, NumberProgram(tmp_path, seconds=0.3), [33, 30])
    written = lines_of(tmp_path)
    assert len(written) == 63
    assert set(written.values()) == {1}
    assert not poisoned
    processes = {worker.about["pid"] for worker in coordinator.workers}
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_a_picture_that_ends_its_worker_each_time_is_given_up(ray: Any, tmp_path: Path) -> None:
    written_to, reported = tmp_path / "written", tmp_path / "reported"
    written_to.mkdir()
    reported.mkdir()
    program = NumberProgram(written_to, fatal=(1, 2), reported=reported)
    coordinator, poisoned = run(ray, program, [8])
    assert poisoned == [Poisoned(0, 1, 2)]
    written = lines_of(written_to)
    assert len(written) == 7
    assert set(written.values()) == {1}
    assert sum(bool(worker.lost) for worker in coordinator.workers) == 5


def test_an_error_of_the_gpu_costs_its_worker_and_names_itself(ray: Any, tmp_path: Path) -> None:
    coordinator, poisoned = run(ray, NumberProgram(tmp_path, failing=1), [4, 5])
    assert poisoned == [Poisoned(1, 1, 0)]
    assert any("illegal memory access" in worker.lost for worker in coordinator.workers)
    assert set(lines_of(tmp_path).values()) == {1}


class RayWithoutMemory:
    """Ray whose memory monitor has killed each worker that dies, as in `ray.exceptions`."""

    def __init__(self, ray: Any, most_deaths: int) -> None:
        self._ray, self._left = ray, most_deaths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ray, name)

    def get(self, reference: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayActorError as exc:
            self._left -= 1
            assert self._left >= 0, "The run goes on without an end."
            raise exceptions.OutOfMemoryError("The node is running low on memory") from exc


def test_a_picture_that_takes_all_memory_each_time_is_given_up(ray: Any, tmp_path: Path) -> None:
    monitored = RayWithoutMemory(ray, most_deaths=8)
    coordinator, poisoned = run(monitored, NumberProgram(tmp_path, fatal=(1, 2)), [8])
    assert poisoned == [Poisoned(0, 1, 2)]
    assert set(lines_of(tmp_path).values()) == {1}
    assert any("low on memory" in worker.lost for worker in coordinator.workers)


def test_workers_without_memory_for_their_models_end_the_run(ray: Any, tmp_path: Path) -> None:
    monitored = RayWithoutMemory(ray, most_deaths=8)
    with pytest.raises(ClusterError, match="low on memory"):
        run(monitored, NumberProgram(tmp_path, dies_at_start=True), [8])


def test_an_error_that_every_worker_has_ends_the_run(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="broken"):
        run(ray, NumberProgram(tmp_path, broken=True), [4])
    with pytest.raises(PictureError, match="cannot be written"):
        run(ray, NumberProgram(tmp_path, full=True), [4])


def test_workers_start_and_prepare_before_there_is_a_program(ray: Any, tmp_path: Path) -> None:
    pool = RayPool(ray, prepare=partial(prepare_a_file, tmp_path))
    try:
        pool.start_ahead(2)
        wait_until(lambda: len(list(tmp_path.glob("prepared-*"))) == 2)
        assert pool.room() == pool.device_count  # nobody has asked for them yet
        pool.use(NumberProgram(tmp_path), None)
        workers = start_all(pool, 2)
    finally:
        pool.close()
    pids = {f"prepared-{worker.about['pid']}" for worker in workers}
    assert {path.name for path in tmp_path.glob("prepared-*")} == pids
    for worker in workers:
        steps = worker.about["start_up"]
        assert steps["process"] < steps["worker"] < steps["prepared"] < steps["ready"]


def test_workers_that_nobody_asked_for_end(ray: Any, tmp_path: Path) -> None:
    pool = RayPool(ray, prepare=partial(prepare_a_file, tmp_path))
    pool.start_ahead(2)
    wait_until(lambda: len(list(tmp_path.glob("prepared-*"))) == 2)
    pool.close()
    pids = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("prepared-*")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_workers_have_the_package_of_the_driver(ray: Any) -> None:
    """A checkout that is not installed is on the driver's path only."""
    assert ray.get(ray.remote(package_file).remote()) == onediff_ext.__file__


@dataclass(frozen=True)
class FromNowhere(Program):
    """A program of a module that workers cannot import."""

    def __reduce__(self) -> Any:
        return (eval, ("__import__('onediff_ext.not_there')",))

    def open(self, name: str, exchange: GraphExchange | None, prepared: Any = None) -> Any: ...


def test_a_package_that_workers_miss_is_named_in_one_line(ray: Any) -> None:
    with pytest.raises(ClusterError) as raised:
        run(ray, FromNowhere(), [4])  # type: ignore[arg-type]
    assert raised.value.message.startswith("Ray's workers on ")
    assert raised.value.message.endswith(" have no module onediff_ext.not_there.")
    assert raised.value.hint.startswith("Install the same version of onediff-ext on all machines")


def test_an_actor_without_the_package_is_told_from_other_deaths() -> None:
    text = (
        "The actor died because of an error raised in its creation task, ray::Worker.__init__()"
        " (pid=7, ip=10.0.0.2)\nModuleNotFoundError: No module named 'onediff_ext'"
    )
    error = missing_package(text)
    assert error is not None
    assert error.message == "Ray's workers on 10.0.0.2 have no module onediff_ext."
    assert missing_package("The actor is dead because its worker process has died.") is None


def test_graphs_and_leases_travel_over_ray(ray: Any) -> None:
    graphs = RayGraphs.start(ray)
    assert graphs.publish("tag", "a" * 64, b"graph")
    assert graphs.digests("tag") == {"a" * 64}
    assert graphs.fetch("tag", "a" * 64) == b"graph"
    assert graphs.lease("tag", "b" * 64, "worker-1")
    assert not graphs.lease("tag", "b" * 64, "worker-2")
    graphs.release_all("worker-1")
    assert graphs.lease("tag", "b" * 64, "worker-2")


def test_ray_leaves_the_print_of_the_process_alone(ray: Any) -> None:
    from ray.experimental import tqdm_ray

    tqdm_ray.instance().hide_bars()  # as before each line that Ray prints of a worker
    assert isinstance(print, types.BuiltinFunctionType)


def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match="need Ray") as raised:
        ray_library.import_ray()
    assert 'pip install "onediff-ext[cluster]"' in raised.value.hint


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "no-such-host.invalid:6379"])
def test_an_address_where_nobody_listens_is_refused_at_once(address: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = address.format(port=free.getsockname()[1])  # bound, and not listened to
        with pytest.raises(ClusterError, match=f"No Ray cluster answers at {address}") as raised:
            ray_library.BackgroundRay(address).ready()
    assert "ray start --head" in raised.value.hint


def test_a_cluster_that_never_answers_can_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered = threading.Event(), threading.Event()

    def init(**options: object) -> None:
        begun.set()
        answered.wait()

    silent = types.SimpleNamespace(init=init, shutdown=lambda: None)
    monkeypatch.setattr(ray_library, "import_ray", lambda: silent)
    monkeypatch.setattr(ray_library, "_CONNECT_LIMIT_S", 0.1)
    background = ray_library.BackgroundRay("auto")
    assert begun.wait(10)
    background.close()
    assert background._thread.is_alive()
    answered.set()
    background._thread.join()  # the current folder is the one from before again


def test_importing_the_cluster_package_loads_no_ray() -> None:
    script = (
        "import sys, onediff_ext.cluster.ray_pool, onediff_ext.cli.cluster_run\n"
        "assert not {'ray', 'torch', 'fsspec'} & set(sys.modules), 'heavy'"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
