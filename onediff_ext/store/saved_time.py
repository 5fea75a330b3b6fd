"""The time that graphs have saved, by machine and checkpoint, in one small file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from onediff_ext.core.records import count, mapping, number
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.shared_record import SharedRecord

SAVED_TIME_FILE = "saved-time.json"
_SCHEMA = 1
# At the end of a picture: a picture that is not counted is better than one that waits.
_LOCK_TIMEOUT_S = 0.1

_Times = dict[str, dict[str, "SavedTime"]]  # machine → checkpoint


@dataclass(frozen=True)
class SavedTime:
    """What graphs have saved with one checkpoint on one machine.

    Args:
        seconds: Estimated time without OneDiff, less the measured time. Negative when comparisons
            of new graphs took more than the graphs saved so far.
        pictures: Pictures that count; those at sizes without a measurement do not.
        since: When the first of them was drawn, in seconds since the epoch.
    """

    seconds: float
    pictures: int
    since: float


class SavedTimes:
    """The saved times of one store. They are only shown, so failed writes are just logged.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._record = SharedRecord(
            folder, SAVED_TIME_FILE, _SCHEMA, _parse, _fields, _LOCK_TIMEOUT_S
        )

    def add(self, machine: str, checkpoint: str, seconds: float) -> None:
        """Count one picture.

        Args:
            machine: Digest of the machine, from `machine_digest`.
            checkpoint: Content hash of the checkpoint.
            seconds: Saved with this picture.
        """

        def add(times: _Times) -> None:
            own = times.setdefault(machine, {})
            before = own.get(checkpoint, SavedTime(0.0, 0, time.time()))
            total = round(before.seconds + seconds, 3)
            own[checkpoint] = SavedTime(total, before.pictures + 1, before.since)

        self._record.change(add)

    def of(self, machine: str, checkpoint: str) -> SavedTime | None:
        """Return what graphs have saved; None when no picture was measured.

        Args:
            machine, checkpoint: As for `add`.
        """
        return self._record.read().get(machine, {}).get(checkpoint)


def _fields(times: _Times) -> dict[str, object]:
    machines = {
        machine: {checkpoint: asdict(saved) for checkpoint, saved in own.items()}
        for machine, own in times.items()
    }
    return {"machines": machines}


def _parse(fields: Mapping[str, object]) -> _Times:
    return {
        machine: {
            checkpoint: _saved(value)
            for checkpoint, value in mapping(own, "saved time of a machine").items()
        }
        for machine, own in mapping(fields.get("machines", {}), "machines").items()
    }


def _saved(value: object) -> SavedTime:
    fields = mapping(value, "saved time of a checkpoint")
    return SavedTime(number(fields, "seconds"), count(fields, "pictures"), number(fields, "since"))
