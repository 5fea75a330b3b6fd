"""How long builds took on this machine and what graphs saved: one small file in the store."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from onediff_ext.core.errors import StoreError
from onediff_ext.core.records import items, mapping, number, text
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError, read_record

_LOG = logging.getLogger(__name__)
_SCHEMA = 1
_FILE = "history.json"
_LOCK_TIMEOUT_S = 5.0
_KEPT_BUILDS = 5  # for each kind of build
_KEPT_STEPS = 64


@dataclass(frozen=True)
class StepRecord:
    """One measured step, eager beside compiled.

    Args:
        checkpoint: Content hash of the checkpoint, or ``""``.
        machine: Where it was measured.
        size: Such as ``"1024x768@2"``.
        eager_ms, compiled_ms: Milliseconds of one step.
        at: Seconds since the epoch.
    """

    checkpoint: str
    machine: str
    size: str
    eager_ms: float
    compiled_ms: float
    at: float


class _Record(TypedDict):
    builds: dict[str, dict[str, list[float]]]  # machine → label → seconds
    steps: list[StepRecord]


class BuildHistory:
    """The history of one store. Losing it costs an estimate, so writes that fail are only logged.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self.folder = folder

    def record_build(self, machine: str, label: str, seconds: float) -> None:
        """Note how long the build of a kind with this label took in its worker."""

        def add(record: _Record) -> None:
            times = record["builds"].setdefault(machine, {}).setdefault(label, [])
            times.append(round(seconds, 3))
            del times[:-_KEPT_BUILDS]

        self._change(add)

    def record_step(
        self, *, checkpoint: str, machine: str, size: str, eager_ms: float, compiled_ms: float
    ) -> None:
        """Note a measured step; an earlier one of the same size is replaced."""
        step = StepRecord(checkpoint, machine, size, eager_ms, compiled_ms, time.time())

        def add(record: _Record) -> None:
            same = (checkpoint, machine, size)
            others = [s for s in record["steps"] if (s.checkpoint, s.machine, s.size) != same]
            record["steps"] = [*others, step][-_KEPT_STEPS:]

        self._change(add)

    def build_seconds(self, machine: str, labels: Sequence[str]) -> list[float | None]:
        """Return how long each of some kinds probably takes to build.

        From builds with the same label; else of the same class of block; else of any;
        None when nothing was built on this machine yet.
        """
        times = self._read()["builds"].get(machine, {})
        return [_expected(times, label) for label in labels]

    def steps(self, machine: str, checkpoint: str | None = None) -> list[StepRecord]:
        """Return the steps measured on a machine, of one checkpoint or of all, oldest first."""
        return [
            step
            for step in self._read()["steps"]
            if step.machine == machine and checkpoint in (None, step.checkpoint)
        ]

    def _read(self) -> _Record:
        try:
            return _parse(read_record(self.folder.home / _FILE))
        except FileNotFoundError:
            pass
        except (StoreError, OSError) as exc:
            _LOG.debug("The history of builds starts again: %s", exc)
        return {"builds": {}, "steps": []}

    def _change(self, change: Callable[[_Record], None]) -> None:
        try:
            self.folder.prepare()
            with self.folder.locks.hold("history", _LOCK_TIMEOUT_S):
                record = self._read()
                change(record)
                steps = [asdict(step) for step in record["steps"]]
                whole = {"schema": _SCHEMA, "builds": record["builds"], "steps": steps}
                encoded = json.dumps(whole, indent=1, sort_keys=True).encode("ascii")
                publish(self.folder, self.folder.home / _FILE, [encoded])
        except StoreError as exc:
            _LOG.debug("The history of builds is not kept: %s", exc)


def _parse(record: object) -> _Record:
    fields = mapping(record, "history")
    if fields.get("schema") != _SCHEMA:
        raise RecordError("It is of another version.")
    builds = {
        machine: {
            label: [number({"seconds": value}, "seconds") for value in items(times)]
            for label, times in mapping(by_label, "build times of a machine").items()
        }
        for machine, by_label in mapping(fields.get("builds"), "build times").items()
    }
    return {"builds": builds, "steps": [_step(step) for step in items(fields.get("steps"))]}


def _step(value: object) -> StepRecord:
    fields = mapping(value, "measured step")
    return StepRecord(
        checkpoint=text(fields, "checkpoint"),
        machine=text(fields, "machine"),
        size=text(fields, "size"),
        eager_ms=_positive(fields, "eager_ms"),
        compiled_ms=_positive(fields, "compiled_ms"),
        at=number(fields, "at"),
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
