"""Workers as Ray actors: one process for each GPU, with its own ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onediff_ext
from onediff_ext.cluster.program import Program
from onediff_ext.cluster.worker import RETURNED, Worker
from onediff_ext.cluster.worker_pool import Event, Finished, Lost, Ready, Returned, WorkerPool
from onediff_ext.core.errors import ClusterError
from onediff_ext.core.words import first_line
from onediff_ext.store import GraphExchange

_THREADS = 6  # three units, one that is given back, and calls that take no time
_LOOK_AT_NODES_S = 2.0
_CLOSE_S = 10.0
_LAST_UNITS_S = 5.0


@dataclass(frozen=True)
class _Call:
    worker: str
    ticket: int | None  # None: the models are loaded


class RayPool(WorkerPool):
    """Workers on all GPUs of a Ray cluster; on a cluster without GPUs, one for each CPU.

    Args:
        ray: The module, connected.
        program: What each worker does; None when `use` says so later.
        exchange: Where graphs are shared; None where all workers share one store.
        prepare: Called in each worker's process before its program is there, such as imports; the
            program gets what it returns.

    Attributes:
        exchange: As given.
    """

    def __init__(
        self,
        ray: Any,
        program: Program | None = None,
        exchange: GraphExchange | None = None,
        prepare: Callable[[], Any] | None = None,
    ) -> None:
        self._ray, self.exchange = ray, exchange
        self._program = None if program is None else ray.put(program)
        self._prepare = prepare
        self._actors: dict[str, Any] = {}
        self._ahead: dict[str, Any] = {}  # they have no program yet, and nobody has asked for them
        self._calls: dict[Any, _Call] = {}
        self._names = itertools.count(1)
        self._room, self._looked_at = 0, -_LOOK_AT_NODES_S
        self._uses_gpus = ray.cluster_resources().get("GPU", 0) > 0

    def start_ahead(self, limit: int | None = None) -> None:
        """Start processes of workers, at most `limit`, before there is a program."""
        room = self.device_count
        for _ in range(room if limit is None else min(room, limit)):
            name = self._next_name()
            self._ahead[name] = self._new_actor(name)

    def use(self, program: Program, exchange: GraphExchange | None) -> None:
        """Say what each worker does, before the first `start`."""
        self._program, self.exchange = self._ray.put(program), exchange

    @property
    def device_count(self) -> int:
        """How many workers the cluster has room for, running ones included."""
        found = self._ray.cluster_resources()
        return int(found.get("GPU" if self._uses_gpus else "CPU", 0))

    def room(self) -> int:
        # Nodes come and go; asking takes a millisecond.
        now_s = time.monotonic()
        if now_s - self._looked_at >= _LOOK_AT_NODES_S:
            self._looked_at, self._room = now_s, self.device_count
        return max(0, self._room - len(self._actors))

    def start(self) -> str:
        name = next(iter(self._ahead), None) or self._next_name()
        actor = self._ahead.pop(name, None) or self._new_actor(name)
        self._actors[name] = actor
        self._calls[actor.open.remote(self._program, self.exchange)] = _Call(name, None)
        return name

    def _next_name(self) -> str:
        return f"worker-{next(self._names)}"

    def _new_actor(self, name: str) -> Any:
        resources = {"num_gpus": 1, "num_cpus": 0} if self._uses_gpus else {"num_cpus": 1}
        actor_class = self._ray.remote(
            max_restarts=0, max_task_retries=0, max_concurrency=_THREADS, **resources
        )(Worker)
        return actor_class.remote(name, self._prepare)

    def submit(self, worker: str, ticket: int, task: Any) -> None:
        self._calls[self._actors[worker].run.remote(ticket, task)] = _Call(worker, ticket)

    def steal(self, worker: str, ticket: int) -> None:
        self._actors[worker].give_back.remote(ticket)

    def events(self, timeout_s: float) -> Sequence[Event]:
        if not self._calls:
            time.sleep(timeout_s)
            return []
        done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        more, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        found: list[Event] = []
        for reference in dict.fromkeys([*done, *more]):
            call = self._calls.pop(reference, None)
            if call is not None:  # else its worker was lost a moment ago
                found.append(self._event(call, reference))
        return found

    def close(self) -> None:
        closing = [actor.close.remote() for actor in self._actors.values()]
        with contextlib.suppress(Exception):  # those that are gone already
            self._ray.wait(closing, num_returns=max(1, len(closing)), timeout=_CLOSE_S)
        for actor in (*self._actors.values(), *self._ahead.values()):
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._ahead.clear()
        self._calls.clear()

    def _event(self, call: _Call, reference: Any) -> Event:
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(reference)
        except exceptions.RayActorError as exc:
            if missing := missing_package(str(exc)):
                return self._lost(call, str(missing), error=missing)
            return self._lost(call, _reason(exc), is_node=_is_node_lost(exc))
        except exceptions.RayTaskError as exc:
            cause = exc.cause if isinstance(exc.cause, Exception) else exc
            if isinstance(cause, (ModuleNotFoundError, exceptions.RaySystemError)):
                cause = missing_package(str(exc)) or cause
            if isinstance(cause, onediff_ext.OneDiffError):
                return self._lost(call, str(cause), error=cause)
            return self._lost(call, f"{type(cause).__name__}: {_reason(cause)}", is_own=True)
        except exceptions.RayError as exc:
            # What is not known to be a machine's end is the worker's own death, as by Ray's memory
            # monitor. A picture that causes it would come back for ever if nobody counted.
            of_nodes = (exceptions.NodeDiedError, exceptions.ObjectLostError)
            return self._lost(call, _reason(exc), is_node=isinstance(exc, of_nodes))
        if call.ticket is None:
            about, error = answer
            if error is not None:
                return self._lost(call, str(error), error=error)
            if about["version"] != onediff_ext.__version__:
                error = ClusterError(
                    f"{about['host']} has onediff-ext {about['version']}, this machine has"
                    f" {onediff_ext.__version__}.",
                    "Install the same version on all machines.",
                )
                return self._lost(call, str(error), error=error)
            return Ready(call.worker, about)
        if answer == RETURNED:
            return Returned(call.worker, call.ticket)
        return Finished(call.worker, call.ticket, answer)

    def _lost(
        self,
        call: _Call,
        reason: str,
        *,
        is_node: bool = False,
        is_own: bool = False,
        error: Exception | None = None,
    ) -> Lost:
        """Give a worker up, with all calls that it still has.

        A worker that has raised an error still lives. What it draws and writes meanwhile counts, so
        that no picture is written twice.
        """
        actor = self._actors.pop(call.worker)
        others = {ref: other for ref, other in self._calls.items() if other.worker == call.worker}
        if others:
            wait_s = _LAST_UNITS_S if is_own else 0
            done, _ = self._ray.wait(list(others), num_returns=len(others), timeout=wait_s)
            finished = tuple(filter(None, (self._finished(others[ref], ref) for ref in done)))
        else:
            finished = ()
        self._ray.kill(actor, no_restart=True)
        for reference in others:
            del self._calls[reference]
        if self.exchange is not None:
            self.exchange.release_all(call.worker)
        ticket = call.ticket if is_own else None
        return Lost(call.worker, reason, is_node, ticket, error, finished)

    def _finished(self, call: _Call, reference: Any) -> Finished | None:
        """Return the outcome of a unit whose worker is lost; None when there is none."""
        try:
            answer = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            return None
        if call.ticket is None or answer == RETURNED:
            return None
        return Finished(call.worker, call.ticket, answer)


def missing_package(text: str) -> ClusterError | None:
    """Return the error for a worker that cannot import what it needs; None for another reason.

    Args:
        text: Of Ray's error, with the worker's traceback.
    """
    module = re.search(r"No module named '([\w.]+)'", text)
    if module is None:
        return None
    address = re.search(r"\bip=([\w.:]+)", text)
    where = f" on {address[1]}" if address else ""
    return ClusterError(
        f"Ray's workers{where} have no module {module[1]}.",
        "Install the same version of onediff-ext on all machines, where their Ray is installed.",
    )


def _reason(exc: BaseException) -> str:
    """Return the line of Ray's message that says why."""
    lines = map(str.strip, str(exc).splitlines())
    told = (line for line in lines if line.startswith("The actor is dead") or "exit detail" in line)
    return next(told, first_line(str(exc), type(exc).__name__))[:200]


def _is_node_lost(exc: BaseException) -> bool:
    return "node has died" in str(exc) or "node was terminated" in str(exc)
