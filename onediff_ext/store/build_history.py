"""Build history: build times of this machine and measured steps, in one small file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from onediff_ext.core.records import items, mapping, number, text
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError
from onediff_ext.store.shared_record import SharedRecord

_SCHEMA = 1
HISTORY_FILE = "history.json"
_LOCK_TIMEOUT_S = 5.0
_KEPT_BUILDS = 5  # for each kind of build
_KEPT_STEPS = 64
# Files of 0.2.0 name no backend. Theirs are taken for the default one's, which they mostly are, and
# 0.2.0 reads what that one builds.
_UNNAMED_BACKEND = "inductor"


@dataclass(frozen=True)
class StepRecord:
    """A measured step, eager and compiled.

    Args:
        checkpoint: Content hash of the checkpoint, or ``""``.
        machine: Digest of the machine, from `machine_digest`.
        size: Such as ``"1024x768@2"``.
        eager_ms, compiled_ms: Milliseconds of one step.
        at: Seconds since the epoch.
        backend: Whose graphs were measured.
    """

    checkpoint: str
    machine: str
    size: str
    eager_ms: float
    compiled_ms: float
    at: float
    backend: str = _UNNAMED_BACKEND

    @property
    def speedup(self) -> float:
        """Eager time over compiled time."""
        return self.eager_ms / self.compiled_ms


_BuildTimes = dict[str, dict[str, list[float]]]  # machine → label → seconds


class _Record(TypedDict):
    builds: dict[str, _BuildTimes]  # by backend
    steps: list[StepRecord]


class BuildHistory:
    """The history of one store. It only serves estimates, so failed writes are just logged.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self.folder = folder
        self._record = SharedRecord(folder, HISTORY_FILE, _SCHEMA, _parse, _fields, _LOCK_TIMEOUT_S)

    def record_build(self, machine: str, backend: str, label: str, seconds: float) -> None:
        """Record a build time.

        Args:
            machine: Digest of the machine.
            backend: Name of the backend that has built.
            label: Label of the kind.
            seconds: Time in the worker.
        """

        def add(record: _Record) -> None:
            builds = record["builds"].setdefault(backend, {})
            times = builds.setdefault(machine, {}).setdefault(label, [])
            times.append(round(seconds, 3))
            del times[:-_KEPT_BUILDS]

        self._record.change(add)

    def record_step(
        self,
        *,
        checkpoint: str,
        machine: str,
        backend: str,
        size: str,
        eager_ms: float,
        compiled_ms: float,
    ) -> None:
        """Record a measured step, replacing an earlier one of the same size and backend.

        Args:
            checkpoint, machine, backend, size, eager_ms, compiled_ms: As in `StepRecord`.
        """
        step = StepRecord(checkpoint, machine, size, eager_ms, compiled_ms, time.time(), backend)

        def add(record: _Record) -> None:
            others = [s for s in record["steps"] if _subject(s) != _subject(step)]
            record["steps"] = [*others, step][-_KEPT_STEPS:]

        self._record.change(add)

    def build_seconds(
        self, machine: str, backend: str, labels: Sequence[str]
    ) -> list[float | None]:
        """Estimate the build time of some kinds.

        Args:
            machine: Digest of the machine.
            backend: Name of the backend that builds; another one's times say nothing of it.
            labels: Labels of the kinds.

        Returns:
            Seconds of each kind: the mean of builds with the same label, else of the same block
            class, else of all builds; None when the backend has built nothing here yet.
        """
        times = self._record.read()["builds"].get(backend, {}).get(machine, {})
        return [_expected(times, label) for label in labels]

    def steps(
        self, machine: str, checkpoint: str | None = None, backend: str | None = None
    ) -> list[StepRecord]:
        """Return measured steps, oldest first.

        Args:
            machine: Digest of the machine.
            checkpoint: Content hash; None returns the steps of all checkpoints.
            backend: Its name; None returns the steps of all backends.
        """
        return [
            step
            for step in self._record.read()["steps"]
            if step.machine == machine
            and checkpoint in (None, step.checkpoint)
            and backend in (None, step.backend)
        ]


def _fields(record: _Record) -> dict[str, object]:
    others = dict(record["builds"])
    unnamed = others.pop(_UNNAMED_BACKEND, {})
    steps = [asdict(step) for step in record["steps"]]
    return {"builds": unnamed, "builds_of_others": others, "steps": steps}


def _parse(fields: Mapping[str, object]) -> _Record:
    others = mapping(fields.get("builds_of_others", {}), "build times of other backends")
    builds = {backend: _build_times(times) for backend, times in others.items()}
    builds[_UNNAMED_BACKEND] = _build_times(fields.get("builds", {}))
    return {"builds": builds, "steps": [_step(step) for step in items(fields.get("steps", []))]}


def _build_times(value: object) -> _BuildTimes:
    return {
        machine: {
            label: [number({"seconds": value}, "seconds") for value in items(times)]
            for label, times in mapping(by_label, "build times of a machine").items()
        }
        for machine, by_label in mapping(value, "build times").items()
    }


def _subject(step: StepRecord) -> tuple[str, str, str, str]:
    return step.checkpoint, step.machine, step.backend, step.size


def _step(value: object) -> StepRecord:
    fields = mapping(value, "measured step")
    return StepRecord(
        checkpoint=text(fields, "checkpoint"),
        machine=text(fields, "machine"),
        size=text(fields, "size"),
        eager_ms=_positive(fields, "eager_ms"),
        compiled_ms=_positive(fields, "compiled_ms"),
        at=number(fields, "at"),
        backend=text(fields, "backend") if "backend" in fields else _UNNAMED_BACKEND,
    )


def _positive(fields: Mapping[str, object], name: str) -> float:
    value = number(fields, name)
    if value <= 0:
        raise RecordError(f"Field {name!r} is not positive.")
    return value


def _expected(times: dict[str, list[float]], label: str) -> float | None:
    if times.get(label):
        return statistics.fmean(times[label])
    block_class = label.partition(" ")[0]
    alike = [s for name, s in times.items() if name.partition(" ")[0] == block_class]
    chosen = [seconds for group in alike or times.values() for seconds in group]
    return statistics.fmean(chosen) if chosen else None
