"""A disk that loses power: what a program wrote, replayed up to any point in any order allowed.

`Recorder` notes the calls that change files. `crashed` builds the folder that a disk may hold
after a cut, by one of two models:

- ordered, like ext4: changes of names reach the disk in their order, at the latest with the next
  fsync of anything; data of a file that was not synced may be missing.
- reordering: each change of a name that no fsync of its folder followed may be missing by itself.

In both, data is sure from the file's own fsync on. As SQLite's tests do it:
https://www.sqlite.org/testing.html#crash_testing.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Change:
    """One call.

    Args:
        what: mkdir, create, write, sync, sync folder, rename, unlink or done.
        path: Of the name that changes; of the folder that is synced.
        target: The new name, of a rename.
        file: Number of the file whose content or name it is.
        content: What was written, or what a test says is done.
    """

    what: str
    path: str = ""
    target: str = ""
    file: int = -1
    content: bytes = b""


@dataclass
class Recorder:
    """Notes the changes below a folder.

    Args:
        root: The disk.
        left_out: Folders of it whose files do not matter after a crash, such as locks.
    """

    root: Path
    left_out: tuple[str, ...] = ("locks",)
    changes: list[Change] = field(default_factory=list)

    def done(self, what: str) -> None:
        """Note that the program was told that something is written."""
        self.changes.append(Change("done", content=what.encode()))

    @contextlib.contextmanager
    def recording(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Within it, changes are noted; they still happen."""
        files: dict[str, int] = {}
        open_files: dict[int, int | str] = {}
        real: dict[str, Any] = {
            name: getattr(os, name)
            for name in ("open", "close", "write", "fsync", "replace", "unlink", "mkdir")
        }

        def inside(path: Any) -> str | None:
            try:
                name = os.path.relpath(os.fspath(path), self.root)
            except (TypeError, ValueError):
                return None
            parts = Path(name).parts
            if name.startswith("..") or set(parts[:-1]) & set(self.left_out):
                return None
            return name

        def note(what: str, **more: Any) -> None:
            self.changes.append(Change(what, **more))

        def open_(path: Any, flags: int, *more: Any, **options: Any) -> int:
            existed = os.path.lexists(path)
            descriptor: int = real["open"](path, flags, *more, **options)
            if (name := inside(path)) is not None:
                if os.path.isdir(path):
                    open_files[descriptor] = name
                elif flags & os.O_CREAT and not existed:
                    files[name] = sum(change.what == "create" for change in self.changes)
                    open_files[descriptor] = files[name]
                    note("create", path=name, file=files[name])
            return descriptor

        def close(descriptor: int) -> None:
            open_files.pop(descriptor, None)
            real["close"](descriptor)

        def write(descriptor: int, content: Any) -> int:
            # In halves, so that a cut may fall between them.
            taken: int = real["write"](descriptor, content[: max(1, len(content) // 2)])
            if isinstance(file := open_files.get(descriptor), int):
                note("write", file=file, content=bytes(content[:taken]))
            return taken

        def fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            opened = open_files.get(descriptor)
            if isinstance(opened, int):
                note("sync", file=opened)
            elif opened is not None:
                note("sync folder", path=opened)

        def replace(source: Any, target: Any, **options: Any) -> None:
            real["replace"](source, target, **options)
            old, new = inside(source), inside(target)
            if old is not None and new is not None:
                files[new] = files.pop(old)
                note("rename", path=old, target=new, file=files[new])

        def unlink(path: Any, **options: Any) -> None:
            real["unlink"](path, **options)
            if (name := inside(path)) is not None and name in files:
                note("unlink", path=name, file=files.pop(name))

        def mkdir(path: Any, *more: Any, **options: Any) -> None:
            real["mkdir"](path, *more, **options)
            if (name := inside(path)) is not None:
                note("mkdir", path=name)

        with patch.context() as patched:
            for name, call in (
                ("open", open_),
                ("close", close),
                ("write", write),
                ("fsync", fsync),
                ("replace", replace),
                ("unlink", unlink),
                ("mkdir", mkdir),
            ):
                patched.setattr(os, name, call)
            yield


_OF_NAMES = ("mkdir", "create", "rename", "unlink")


def crashed(
    changes: list[Change], folder: Path, *, reordering: bool, chance: random.Random
) -> None:
    """Build in `folder` what a disk may hold when the power goes after some changes."""
    kept = _kept_names(changes, reordering, chance)
    names: dict[str, int | None] = {".": None}  # None is a folder
    for change in kept:
        if change.what == "mkdir":
            names[change.path] = None
        elif change.what == "create":
            names[change.path] = change.file
        elif change.what == "unlink":
            names.pop(change.path, None)
        else:
            # The old name may stay, when its folder was not synced.
            if not reordering or chance.random() < 0.7:
                names.pop(change.path, None)
            names[change.target] = change.file
    for name in sorted(names):
        file, path = names[name], folder / name
        if not path.parent.is_dir():
            continue  # its folder's own name was lost
        if file is None:
            path.mkdir(mode=0o700, exist_ok=True)
        else:
            path.write_bytes(_content(changes, file, chance))
            path.chmod(0o600)


def _kept_names(changes: list[Change], reordering: bool, chance: random.Random) -> list[Change]:
    of_names = [(at, change) for at, change in enumerate(changes) if change.what in _OF_NAMES]
    if not reordering:
        sure = max((at for at, c in enumerate(changes) if c.what.startswith("sync")), default=-1)
        end = chance.randrange(sure, len(changes)) if changes else -1
        return [change for at, change in of_names if at <= end]
    synced: dict[str, int] = {}
    for at, change in enumerate(changes):
        if change.what == "sync folder":
            synced[change.path] = at
    loss = chance.choice([0.0, 0.3, 1.0])
    return [
        change
        for at, change in of_names
        if at < synced.get(os.path.dirname(change.target or change.path) or ".", -1)
        or chance.random() >= loss
    ]


def _content(changes: list[Change], file: int, chance: random.Random) -> bytes:
    own = [change for change in changes if change.file == file]
    sure = max((at for at, change in enumerate(own) if change.what == "sync"), default=0)
    certain = b"".join(c.content for c in own[:sure] if c.what == "write")
    rest = b"".join(c.content for c in own[sure:] if c.what == "write")
    kind = chance.choice(["none", "cut", "zeros", "all"])
    if kind == "cut":
        rest = rest[: chance.randrange(len(rest) + 1)]
    return certain + {"none": b"", "zeros": bytes(len(rest))}.get(kind, rest)
