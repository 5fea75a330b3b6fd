"""What the last picture of each WebUI was drawn with: the next start loads its graphs early."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from onediff_ext.core.errors import StoreError
from onediff_ext.core.records import mapping, text
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder
from onediff_ext.store.json_records import RecordError, read_or_empty
from onediff_ext.store.stored_graph import is_digest

logger = logging.getLogger(__name__)

LAST_USE_FILE = "last-use.json"
_SCHEMA = 1
# At the end of a picture: a next start without graphs at once is better than a picture that waits.
_LOCK_TIMEOUT_S = 0.1


@dataclass(frozen=True)
class WebUIUse:
    """What a picture was drawn with.

    Args:
        choices: The user's, by name, as JSON has them.
        content_hash, name, path, architecture: Of the checkpoint, as in `CheckpointRecords.record`.
        device: Where its models were, such as ``"cuda:0"``.
    """

    choices: Mapping[str, object]
    content_hash: str
    name: str
    path: str
    architecture: str
    device: str


class WebUIUses:
    """The last uses of the WebUIs that share a store.

    Args:
        folder: The store, e.g. `GraphLibrary.folder`.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder

    def forget(self, host: str) -> None:
        """Forget a WebUI's last use: the user draws without graphs now.

        Args:
            host: The WebUI's name.
        """
        self._write(host, None)

    def of(self, host: str) -> WebUIUse | None:
        """Return what the last picture was drawn with; None if there was none.

        Args:
            host: The WebUI's name, e.g. ``"forge"``.
        """
        return self._read().get(host)

    def note(self, host: str, use: WebUIUse) -> None:
        """Remember what a picture was drawn with. A failed write is just logged.

        Args:
            host: The WebUI's name.
            use: What it was drawn with.
        """
        self._write(host, use)

    def _write(self, host: str, use: WebUIUse | None) -> None:
        try:
            self._folder.prepare()
            with self._folder.locks.hold("last-use", _LOCK_TIMEOUT_S):
                uses = self._read()
                uses.pop(host, None)
                if use is not None:
                    uses[host] = use
                whole = {"schema": _SCHEMA, "hosts": {name: asdict(u) for name, u in uses.items()}}
                encoded = json.dumps(whole, indent=1, sort_keys=True).encode("ascii")
                publish(self._folder, self._folder.home / LAST_USE_FILE, [encoded])
        except StoreError as exc:
            logger.debug("The last use is not written: %s", exc)

    def _read(self) -> dict[str, WebUIUse]:
        return read_or_empty(self._folder.home / LAST_USE_FILE, _parse, {}, "last use")


def _parse(record: object) -> dict[str, WebUIUse]:
    fields = mapping(record, "last use")
    if fields.get("schema") != _SCHEMA:
        raise RecordError("It is of another version.")
    hosts = mapping(fields.get("hosts"), "hosts")
    return {name: _use(mapping(value, "last use of a host")) for name, value in hosts.items()}


def _use(fields: dict[str, object]) -> WebUIUse:
    names = ("content_hash", "name", "path", "architecture", "device")
    choices = mapping(fields.get("choices"), "choices")
    use = WebUIUse(choices, **{name: text(fields, name) for name in names})
    if not is_digest(use.content_hash):
        raise RecordError("Its content hash is none.")
    return use
