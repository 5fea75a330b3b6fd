"""Full and read-only disks: a clear error, and no partial files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onediff_ext.core.errors import StoreError, StoreFullError, StoreReadOnlyError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import CheckpointRecords, ContentHashes, GraphLibrary
from onediff_ext.store.durable_write import sync_folder
from tests.support.systems import needs_fork

OLD, NEW = KindKey({"graph": "old"}), KindKey({"graph": "new"})


@pytest.fixture
def library(tmp_path: Path) -> GraphLibrary:
    library = GraphLibrary(tmp_path / "store", 1 << 20)
    put(library, OLD)
    return library


def put(library: GraphLibrary, key: KindKey, payload: bytes = b"code" * 1000) -> None:
    library.put(key, payload, label="L", backend="b", build_seconds=1, details={})


def fail_after(calls: int, code: int, original: Callable[..., object]) -> Callable[..., object]:
    left = iter(range(calls))

    def failing(*args: object, **options: object) -> object:
        if next(left, None) is None:
            raise OSError(code, os.strerror(code))
        return original(*args, **options)

    return failing


def expect_old_store(library: GraphLibrary) -> None:
    assert [graph.key for graph in library.entries()] == [OLD]
    assert library.verify() == []
    assert list(library.folder.tmp.iterdir()) == []
    assert [p.name for p in library.folder.locks.folder.iterdir()] in ([], ["guard.lock"])


ERRORS = {
    errno.ENOSPC: StoreFullError,
    errno.EDQUOT: StoreFullError,
    errno.EFBIG: StoreFullError,
    errno.EROFS: StoreReadOnlyError,
    errno.EACCES: StoreReadOnlyError,
    errno.EIO: StoreError,
}


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *((call, code) for call in ("write", "fsync", "replace") for code in ERRORS),
        ("close", errno.ENOSPC),  # network disks tell it this late
    ],
)
def test_a_failing_call_leaves_the_old_store(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    # `durable_write` and `atomic_write` take their system calls from a copy of `os`.
    with monkeypatch.context() as patch:
        if call == "close":
            closing = os.close

            def close_and_fail(descriptor: int) -> None:
                closing(descriptor)
                raise OSError(code, os.strerror(code))

            patch.setattr("onediff_ext.store.durable_write.os", with_call("close", close_and_fail))
        else:
            broken = with_call(call, fail_after(0, code, getattr(os, call)))
            patch.setattr("onediff_ext.store.durable_write.os", broken)
            patch.setattr("onediff_ext.store.atomic_write.os", broken)
        with pytest.raises(ERRORS[code]) as caught:
            put(library, NEW)
    assert caught.value.hint
    assert isinstance(caught.value.__cause__, OSError)
    expect_old_store(library)
    put(library, NEW)
    assert library.get(NEW) is not None


class with_call:  # noqa: N801 - reads like the function it stands for
    """The module `os` with one function replaced."""

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        setattr(self, name, function)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def test_short_writes_are_continued(library: GraphLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    short = with_call("write", lambda descriptor, chunk: os.write(descriptor, chunk[:777]))
    monkeypatch.setattr("onediff_ext.store.durable_write.os", short)
    put(library, NEW)
    got = library.get(NEW)
    assert got is not None
    assert got.payload == b"code" * 1000


def test_bytes_are_on_the_disk_before_their_name_is(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noting(name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)  # type: ignore[call-overload]
            calls.append(f"{name} folder" if is_folder else name)
            return getattr(os, name)(*args)

        return call

    monkeypatch.setattr("onediff_ext.store.durable_write.os", with_call("fsync", noting("fsync")))
    monkeypatch.setattr(
        "onediff_ext.store.atomic_write.os", with_call("replace", noting("replace"))
    )
    put(library, NEW)
    assert calls == ["fsync", "replace"] + (["fsync folder"] if os.name != "nt" else [])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_disks_that_cannot_sync_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    if os.name == "nt":
        pytest.skip("Windows syncs no folders")
    broken = with_call("fsync", fail_after(0, code, os.fsync))
    monkeypatch.setattr("onediff_ext.store.durable_write.os", broken)
    if code == errno.EINVAL:
        sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match="error"):
            sync_folder(tmp_path)


def test_an_interrupted_put_leaves_nothing(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("onediff_ext.store.durable_write.os", with_call("fsync", interrupt))
        with pytest.raises(KeyboardInterrupt):
            put(library, NEW)
    expect_old_store(library)


def test_disk_full_half_way_through_the_bytes(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = fail_after(3, errno.ENOSPC, lambda fd, chunk: os.write(fd, chunk[:500]))
    with monkeypatch.context() as patch:
        patch.setattr("onediff_ext.store.durable_write.os", with_call("write", write))
        with pytest.raises(StoreFullError):
            put(library, NEW)
    expect_old_store(library)


def test_errors_of_the_one_who_builds_pass_through_the_lock(library: GraphLibrary) -> None:
    with (
        pytest.raises(OSError, match="the builder's own"),
        library.build_lock(NEW, 1),
    ):
        raise OSError(errno.ENOSPC, "the builder's own")
    with library.build_lock(NEW, 0):
        pass


def test_a_simulated_read_only_store_still_serves(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr("filelock.BaseFileLock.acquire", refuse)
    assert library.get(OLD) is not None
    expect_refusals(library, tmp_path)
    damaged = library.entries()[0].path
    damaged.write_bytes(b"damaged")
    assert library.get(OLD) is None
    assert library.explain(OLD).endswith("it could not be removed")


def expect_refusals(library: GraphLibrary, model_folder: Path) -> None:
    with pytest.raises(StoreReadOnlyError) as caught:
        put(library, NEW)
    assert "ONEDIFF_STORE" in caught.value.hint
    with pytest.raises(StoreReadOnlyError), library.build_lock(NEW, 1):
        pass
    with pytest.raises(StoreReadOnlyError):
        library.prune(limit_bytes=0)
    with pytest.raises(StoreReadOnlyError):
        CheckpointRecords(library.folder).record(
            "a" * 64, name="n", path="p", architecture="SDXL", kinds={}
        )
    model = model_folder / "m.safetensors"
    model.write_bytes(b"w")
    assert len(ContentHashes(library.folder).content_hash(model)) == 64


def in_child(action: Callable[[], None]) -> None:
    """Run `action` in a forked child, which may give up privileges."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see the captured output"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike tmp_path."""
    folder = Path(tempfile.mkdtemp(prefix="onediff-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_fork
def test_a_store_without_write_permission_still_serves(open_folder: Path) -> None:
    library = GraphLibrary(open_folder / "store", 1 << 20)
    put(library, OLD)
    models = open_folder / "models"
    models.mkdir()
    models.chmod(0o777)
    for path in library.folder.root.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    library.folder.root.chmod(0o555)

    def use() -> None:
        if os.getuid() == 0:
            os.setuid(65534)  # root may write anywhere; nobody may not
        reader = GraphLibrary(library.folder.root, 1 << 20)
        assert reader.get(OLD) is not None
        assert len(reader.entries()) == 1
        assert reader.verify() == []
        with pytest.raises(StoreReadOnlyError):
            reader.delete(OLD.digest)
        expect_refusals(reader, models)

    try:
        in_child(use)
    finally:
        for path in [library.folder.root, *library.folder.root.rglob("*")]:
            path.chmod(0o700)


@needs_fork
def test_a_store_in_a_folder_that_may_not_be_made(open_folder: Path) -> None:
    def use() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        with pytest.raises(StoreReadOnlyError):
            put(GraphLibrary(open_folder / "deep" / "store", 1 << 20), NEW)

    if os.getuid() != 0:
        open_folder.chmod(0o555)
    try:
        in_child(use)
    finally:
        open_folder.chmod(0o755)


@needs_fork
def test_a_real_limit_of_the_system(library: GraphLibrary) -> None:
    def use() -> None:
        import resource  # POSIX only

        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(StoreFullError):
            put(library, NEW)

    in_child(use)
    expect_old_store(library)


REAL_DISK = """
import os, sys
from pathlib import Path
from onediff_ext.core.errors import StoreFullError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import GraphLibrary
library = GraphLibrary(Path(sys.argv[1]) / "store", 1 << 30)
stored = 0
try:
    for stored in range(100):
        library.put(KindKey({"n": str(stored)}), os.urandom(100_000), label="L", backend="b",
                    build_seconds=1, details={})
except StoreFullError as exc:
    assert exc.hint
    assert stored > 3, stored
    assert len(library.entries()) == stored, stored
    assert library.verify() == []
    assert not list(library.folder.tmp.iterdir())
    library.prune(limit_bytes=300_000)
    library.put(KindKey({"n": "after"}), b"x", label="L", backend="b", build_seconds=1, details={})
    print("was full and recovered")
"""


def test_a_real_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {disk}"
    # A user namespace needs no root; the mount is gone with it.
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    try:
        subprocess.run([*enter, mount], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as exc:
        pytest.skip(f"no private mounts here: {exc}")
    command = f"{mount}; exec '{sys.executable}' -c \"$1\" {disk}"
    done = subprocess.run(
        [*enter, command, "sh", REAL_DISK],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.strip() == "was full and recovered", done.stderr
