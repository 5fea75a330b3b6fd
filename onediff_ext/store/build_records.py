"""Build records: failed builds, load checks and evictions of each kind.

One small file for each kind that has something to remember. A lost record only costs time, so a
damaged file counts as missing. The format keeps older names: the folder is "verdicts", and load
checks are stored as "proofs".
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from onediff_ext.core.errors import StoreError
from onediff_ext.core.records import count, mapping, number, text
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError, read_record, record_paths
from onediff_ext.store.stored_graph import graph_path, is_digest

_LOG = logging.getLogger(__name__)
# Version 1 recorded every failure, even when another extension's patch, a race with the host or the
# machine was the cause. Only its passed load checks are still valid.
_SCHEMA = 2
_LOCK_TIMEOUT_S = 10.0
# For a store that several machines share. The oldest are forgotten first.
_MAX_MACHINES = 16


@dataclass(frozen=True)
class Failure:
    """Why a kind cannot be built.

    Args:
        reason: For people.
        attempts: Number of failed builds.
        at: Seconds since the epoch.
        version: Of this product. Another version tries again.
    """

    reason: str
    attempts: int
    at: float
    version: str


@dataclass(frozen=True)
class LoadCheck:
    """The result of the first load of one graph on one machine.

    Args:
        payload_sha256: Hash of the checked bytes, 64 hexadecimal digits.
        problem: What is wrong with the graph; ``""`` when it loads and computes eager's results.
        at: Seconds since the epoch.
    """

    payload_sha256: str
    problem: str
    at: float


@dataclass(frozen=True)
class Tuning:
    """What it brought to build one graph again with more effort, on one machine.

    Args:
        settings: From `Backend.tuning`. Others are worth another attempt.
        before_ms: A call of the graph that was stored, for large pictures.
        after_ms: A call of the graph that is stored now: the same one if the other was no faster.
        problem: Why there was nothing to measure, or ``""``.
        at: Seconds since the epoch.
    """

    settings: str
    before_ms: float
    after_ms: float
    problem: str
    at: float


@dataclass(frozen=True)
class Eviction:
    """Why a kind's graph was deleted.

    Args:
        reason: For people.
        at: Seconds since the epoch.
    """

    reason: str
    at: float


@dataclass(frozen=True)
class BuildRecord:
    """Everything that is remembered about one kind.

    Args:
        digest: Of the kind's key.
        label: For people.
        failure: Why it cannot be built, or None.
        load_checks: Digest of a machine → the load check there. Stored as "proofs".
        eviction: Why its graph was deleted, or None.
        tunings: Digest of a machine → what tuning brought there.
    """

    digest: str
    label: str = ""
    failure: Failure | None = None
    load_checks: dict[str, LoadCheck] = field(default_factory=dict)
    eviction: Eviction | None = None
    tunings: dict[str, Tuning] = field(default_factory=dict)


class BuildRecords:
    """The build records of one store. Failed writes are only logged: a record just saves time.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self.folder = folder

    def read(self, digest: str) -> BuildRecord:
        """Return the record of a kind; an empty one when there is none.

        Args:
            digest: Of the kind's key.
        """
        try:
            return _parse(digest, read_record(self._path(digest)))
        except FileNotFoundError:
            return BuildRecord(digest)
        except (StoreError, OSError) as exc:
            _LOG.debug("Build record %s is left out: %s", digest[:12], exc)
            return BuildRecord(digest)

    def failure(self, digest: str, version: str) -> Failure | None:
        """Return why a kind cannot be built; None when it may be tried.

        Args:
            digest: Of the kind's key.
            version: Of this product; failures of other versions do not count.
        """
        failure = self.read(digest).failure
        return failure if failure is not None and failure.version == version else None

    def load_check(self, digest: str, machine: str, payload_sha256: str) -> LoadCheck | None:
        """Return the load check of a graph on a machine; None when there was none.

        Args:
            digest: Of the kind's key.
            machine: Digest of the machine.
            payload_sha256: Hash of the graph's bytes.
        """
        load_check = self.read(digest).load_checks.get(machine)
        return (
            load_check
            if load_check is not None and load_check.payload_sha256 == payload_sha256
            else None
        )

    def record_failure(
        self, digest: str, label: str, reason: str, *, attempts: int, version: str
    ) -> None:
        """Record that a kind cannot be built.

        Args:
            digest: Of the kind's key.
            label: Of the kind.
            reason, attempts, version: As in `Failure`.
        """
        failure = Failure(reason, attempts, time.time(), version)
        self._change(digest, label, lambda v: replace(v, label=label, failure=failure))

    def record_load_check(
        self, digest: str, label: str, *, machine: str, payload_sha256: str, problem: str = ""
    ) -> None:
        """Record a load check; clears a failure.

        Args:
            digest: Of the kind's key.
            label: Of the kind.
            machine: Digest of the machine.
            payload_sha256, problem: As in `LoadCheck`.
        """
        load_check = LoadCheck(payload_sha256, problem, time.time())

        def add(build_record: BuildRecord) -> BuildRecord:
            load_checks = {**build_record.load_checks, machine: load_check}
            kept = _latest(load_checks)
            return replace(build_record, label=label, failure=None, load_checks=kept)

        self._change(digest, label, add)

    def record_tuning(self, digest: str, label: str, *, machine: str, tuning: Tuning) -> None:
        """Record what tuning a kind's graph brought on a machine.

        Args:
            digest: Of the kind's key.
            label: Of the kind.
            machine: Digest of the machine.
            tuning: What was measured.
        """

        def add(build_record: BuildRecord) -> BuildRecord:
            tunings = {**build_record.tunings, machine: tuning}
            return replace(build_record, label=label, tunings=_latest(tunings))

        self._change(digest, label, add)

    def record_eviction(self, digest: str, reason: str) -> None:
        """Record why a kind's graph was deleted; what it was tuned to is gone with it.

        Args:
            digest: Of the kind's key.
            reason: As in `Eviction`.
        """
        eviction = Eviction(reason, time.time())
        self._change(digest, digest[:12], lambda v: replace(v, eviction=eviction, tunings={}))

    def failures(self) -> Iterator[BuildRecord]:
        """Yield the records of kinds that cannot be built, sorted by digest."""
        for path in record_paths(self.folder.build_records):
            if is_digest(path.stem):
                build_record = self.read(path.stem)
                if build_record.failure is not None:
                    yield build_record

    def retry(self) -> list[str]:
        """Forget all failures, so that the kinds are built again.

        Returns:
            The labels of the kinds.

        Raises:
            StoreError: The folder cannot be written.
        """
        forgotten = []
        for build_record in list(self.failures()):
            self._write(replace(build_record, failure=None))
            forgotten.append(build_record.label or build_record.digest)
        return forgotten

    def _change(
        self, digest: str, label: str, change: Callable[[BuildRecord], BuildRecord]
    ) -> None:
        try:
            self.folder.prepare()
            # The lock has its older name too: processes of earlier versions may share the store.
            with self.folder.locks.hold(f"verdict-{digest}", _LOCK_TIMEOUT_S):
                self._write(change(self.read(digest)))
        except StoreError as exc:
            _LOG.info("The build record of %s is not written: %s", label, exc)

    def _write(self, build_record: BuildRecord) -> None:
        record = _as_json(build_record)
        encoded = json.dumps(record, indent=1, sort_keys=True).encode("ascii")
        publish(self.folder, self._path(build_record.digest), [encoded])

    def _path(self, digest: str) -> Path:
        graph_path(self.folder.graphs, digest)  # raises OptionError for anything but a digest
        return self.folder.build_records / f"{digest}.json"


_OfMachine = TypeVar("_OfMachine", LoadCheck, Tuning)


def _latest(of_machines: Mapping[str, _OfMachine]) -> dict[str, _OfMachine]:
    latest = sorted(of_machines, key=lambda name: -of_machines[name].at)[:_MAX_MACHINES]
    return {name: of_machines[name] for name in latest}


def _as_json(build_record: BuildRecord) -> dict[str, object]:
    """The record as it is stored; on disk the load checks are called "proofs"."""
    fields = asdict(build_record)
    if not build_record.tunings:  # as records were before there were any
        del fields["tunings"]
    return {"schema": _SCHEMA, "proofs": fields.pop("load_checks"), **fields}


def _parse(digest: str, record: object) -> BuildRecord:
    fields = mapping(record, "build record")
    schema = fields.get("schema")
    if schema not in (1, _SCHEMA) or fields.get("digest") != digest:
        raise RecordError("It is of another version, or of another kind.")
    failure = fields.get("failure") if schema == _SCHEMA else None
    eviction = fields.get("eviction")
    listed = mapping(fields.get("proofs"), "list of load checks")
    load_checks = {
        name: _load_check(mapping(load_check, "proof")) for name, load_check in listed.items()
    }
    tunings = mapping(fields.get("tunings", {}), "list of tunings")
    if schema != _SCHEMA:
        load_checks = {
            name: load_check for name, load_check in load_checks.items() if not load_check.problem
        }
    return BuildRecord(
        digest=digest,
        label=text(fields, "label"),
        failure=None if failure is None else _failure(mapping(failure, "failure")),
        load_checks=load_checks,
        eviction=None if eviction is None else _eviction(mapping(eviction, "eviction")),
        tunings={name: _tuning(mapping(each, "tuning")) for name, each in tunings.items()},
    )


def _failure(fields: Mapping[str, object]) -> Failure:
    return Failure(
        reason=text(fields, "reason"),
        attempts=count(fields, "attempts"),
        at=number(fields, "at"),
        version=text(fields, "version"),
    )


def _load_check(fields: Mapping[str, object]) -> LoadCheck:
    return LoadCheck(
        payload_sha256=text(fields, "payload_sha256"),
        problem=text(fields, "problem"),
        at=number(fields, "at"),
    )


def _tuning(fields: Mapping[str, object]) -> Tuning:
    return Tuning(
        settings=text(fields, "settings"),
        before_ms=number(fields, "before_ms"),
        after_ms=number(fields, "after_ms"),
        problem=text(fields, "problem"),
        at=number(fields, "at"),
    )


def _eviction(fields: Mapping[str, object]) -> Eviction:
    return Eviction(reason=text(fields, "reason"), at=number(fields, "at"))
