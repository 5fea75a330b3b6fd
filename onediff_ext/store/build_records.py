"""What was learnt about a kind on this machine: it cannot be built, its graph is harmless or bad.

One small file for each kind that has something to remember. Losing one costs time and
nothing else, so a damaged file counts as none.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from onediff_ext.core.errors import StoreError
from onediff_ext.core.records import count, mapping, number, text
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError, read_record, record_paths
from onediff_ext.store.stored_graph import graph_path, is_digest

_LOG = logging.getLogger(__name__)
# Up to 1, what failed in a process was held against the kind, whoever was to blame: another
# extension's patch, a race with the host, the machine. What was found good then still is.
_SCHEMA = 2
_LOCK_TIMEOUT_S = 10.0
# A store that several machines share; more than these are forgotten, oldest first.
_MAX_PROOFS = 16


@dataclass(frozen=True)
class Failure:
    """Why a kind cannot be built.

    Args:
        reason: In plain words.
        attempts: How often it was tried.
        at: Seconds since the epoch.
        version: Of this product; another version tries again.
    """

    reason: str
    attempts: int
    at: float
    version: str


@dataclass(frozen=True)
class LoadCheck:
    """What the first load of one graph on one machine showed.

    Args:
        payload_sha256: Of exactly these bytes.
        problem: What is wrong with it; ``""`` when it is harmless and gives eager's results.
        at: Seconds since the epoch.
    """

    payload_sha256: str
    problem: str
    at: float


@dataclass(frozen=True)
class Eviction:
    """Why a kind's graph was deleted.

    Args:
        reason: In plain words.
        at: Seconds since the epoch.
    """

    reason: str
    at: float


@dataclass(frozen=True)
class BuildRecord:
    """All that is remembered about one kind.

    Args:
        digest: Of the kind's key.
        label: For people.
        failure: Why it cannot be built, if it cannot.
        proofs: Machine → what its first load there showed.
        eviction: Why its graph was deleted, if it was.
    """

    digest: str
    label: str = ""
    failure: Failure | None = None
    proofs: dict[str, LoadCheck] = field(default_factory=dict)
    eviction: Eviction | None = None


class BuildRecords:
    """The verdicts of one store. A write that fails is logged: what it would have saved is time.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self.folder = folder

    def read(self, digest: str) -> BuildRecord:
        """Return what is remembered about a kind; an empty verdict when nothing is."""
        try:
            return _parse(digest, read_record(self._path(digest)))
        except FileNotFoundError:
            return BuildRecord(digest)
        except (StoreError, OSError) as exc:
            _LOG.debug("Verdict %s is left out: %s", digest[:12], exc)
            return BuildRecord(digest)

    def failure(self, digest: str, version: str) -> Failure | None:
        """Return why a kind cannot be built by this version, or None when it may be tried."""
        failure = self.read(digest).failure
        return failure if failure is not None and failure.version == version else None

    def proof(self, digest: str, machine: str, payload_sha256: str) -> LoadCheck | None:
        """Return what the first load of these bytes on a machine showed, if there was one."""
        proof = self.read(digest).proofs.get(machine)
        return proof if proof is not None and proof.payload_sha256 == payload_sha256 else None

    def record_failure(
        self, digest: str, label: str, reason: str, *, attempts: int, version: str
    ) -> None:
        """Remember that a kind cannot be built."""
        failure = Failure(reason, attempts, time.time(), version)
        self._change(digest, label, lambda v: replace(v, label=label, failure=failure))

    def record_load_check(
        self, digest: str, label: str, *, machine: str, payload_sha256: str, problem: str = ""
    ) -> None:
        """Remember what the first load of some bytes on a machine showed; clears a failure."""
        proof = LoadCheck(payload_sha256, problem, time.time())

        def add(verdict: BuildRecord) -> BuildRecord:
            proofs = {**verdict.proofs, machine: proof}
            latest = sorted(proofs, key=lambda name: -proofs[name].at)[:_MAX_PROOFS]
            kept = {name: proofs[name] for name in latest}
            return replace(verdict, label=label, failure=None, proofs=kept)

        self._change(digest, label, add)

    def record_eviction(self, digest: str, reason: str) -> None:
        """Remember why a kind's graph was deleted."""
        eviction = Eviction(reason, time.time())
        self._change(digest, digest[:12], lambda v: replace(v, eviction=eviction))

    def failures(self) -> Iterator[BuildRecord]:
        """Yield the kinds that cannot be built, by digest."""
        for path in record_paths(self.folder.build_records):
            if is_digest(path.stem):
                verdict = self.read(path.stem)
                if verdict.failure is not None:
                    yield verdict

    def retry(self, digest: str | None = None) -> list[str]:
        """Forget why a kind (all when None) cannot be built; return their labels.

        Raises:
            StoreError: The folder cannot be written.
        """
        forgotten = []
        for verdict in list(self.failures()):
            if digest is None or verdict.digest == digest:
                self._write(replace(verdict, failure=None))
                forgotten.append(verdict.label or verdict.digest)
        return forgotten

    def _change(
        self, digest: str, label: str, change: Callable[[BuildRecord], BuildRecord]
    ) -> None:
        try:
            self.folder.prepare()
            with self.folder.locks.hold(f"verdict-{digest}", _LOCK_TIMEOUT_S):
                self._write(change(self.read(digest)))
        except StoreError as exc:
            _LOG.info("What was learnt about %s is not kept: %s", label, exc)

    def _write(self, verdict: BuildRecord) -> None:
        record = {"schema": _SCHEMA, **asdict(verdict)}
        encoded = json.dumps(record, indent=1, sort_keys=True).encode("ascii")
        publish(self.folder, self._path(verdict.digest), [encoded])

    def _path(self, digest: str) -> Path:
        graph_path(self.folder.graphs, digest)  # refuses what is no digest
        return self.folder.build_records / f"{digest}.json"


def _parse(digest: str, record: object) -> BuildRecord:
    fields = mapping(record, "verdict")
    schema = fields.get("schema")
    if schema not in (1, _SCHEMA) or fields.get("digest") != digest:
        raise RecordError("It is of another version, or of another kind.")
    failure = fields.get("failure") if schema == _SCHEMA else None
    eviction = fields.get("eviction")
    listed = mapping(fields.get("proofs"), "list of proofs")
    proofs = {name: _proof(mapping(proof, "proof")) for name, proof in listed.items()}
    if schema != _SCHEMA:
        proofs = {name: proof for name, proof in proofs.items() if not proof.problem}
    return BuildRecord(
        digest=digest,
        label=text(fields, "label"),
        failure=None if failure is None else _failure(mapping(failure, "failure")),
        proofs=proofs,
        eviction=None if eviction is None else _eviction(mapping(eviction, "eviction")),
    )


def _failure(fields: Mapping[str, object]) -> Failure:
    return Failure(
        reason=text(fields, "reason"),
        attempts=count(fields, "attempts"),
        at=number(fields, "at"),
        version=text(fields, "version"),
    )


def _proof(fields: Mapping[str, object]) -> LoadCheck:
    return LoadCheck(
        payload_sha256=text(fields, "payload_sha256"),
        problem=text(fields, "problem"),
        at=number(fields, "at"),
    )


def _eviction(fields: Mapping[str, object]) -> Eviction:
    return Eviction(reason=text(fields, "reason"), at=number(fields, "at"))
