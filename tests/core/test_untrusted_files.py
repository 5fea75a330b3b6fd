"""The reader for files that somebody else may have made waits for nothing and knows its limits."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
import zipfile
from pathlib import Path

import pytest

from onediff_ext.core import untrusted_files
from onediff_ext.core.errors import UnsafeFileError
from onediff_ext.core.untrusted_files import open_regular, read_regular

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files of Linux")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
def test_a_file_within_the_limit_is_read(tmp_path: Path, size: int) -> None:
    (tmp_path / "a").write_bytes(bytes(range(250)) * 4)
    os.truncate(tmp_path / "a", size)
    assert read_regular(tmp_path / "a", limit_bytes=1000) == (bytes(range(250)) * 4)[:size]


def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(UnsafeFileError, match=r"larger .*\(1000 bytes\)") as caught:
        read_regular(tmp_path / "a", limit_bytes=1000)
    assert caught.value.hint


def test_the_file_seeks_and_reads_as_any_other(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x", "text" * 10_000)
    size = (tmp_path / "a.zip").stat().st_size
    with open_regular(tmp_path / "a.zip", limit_bytes=size) as file:
        assert zipfile.ZipFile(file).read("x") == b"text" * 10_000
        file.seek(-2, os.SEEK_END)
        assert len(file.read()) == 2
        file.seek(size + 100)
        assert file.read() == b""  # past the end, not past the limit
        assert os.fstat(file.fileno()).st_size == size
        assert isinstance(file, io.BufferedReader)
    assert file.closed


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "a", limit_bytes=1)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises((UnsafeFileError, PermissionError)):
        open_regular(tmp_path, limit_bytes=1)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
def test_a_text_that_names_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises((UnsafeFileError, FileNotFoundError)):
        open_regular(tmp_path / name, limit_bytes=1)


@posix
@pytest.mark.timeout(20)
def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(UnsafeFileError, match="a pipe"):
        read_regular(tmp_path / "a", limit_bytes=1000)


@posix
@pytest.mark.timeout(20)
def test_a_fifo_that_appears_after_the_first_look_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "a")
    looks: list[object] = []

    def look(path: Path, status: os.stat_result, check=untrusted_files._refuse_irregular) -> None:
        looks.append(status)
        if len(looks) > 1:
            check(path, status)

    monkeypatch.setattr(untrusted_files, "_refuse_irregular", look)
    before = descriptors()
    with pytest.raises(UnsafeFileError, match="a pipe"):
        open_regular(tmp_path / "a", limit_bytes=1000)
    assert len(looks) == 2
    assert descriptors() == before


@posix
@pytest.mark.timeout(20)
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/tty", "/dev/null"])
def test_a_device_is_refused(tmp_path: Path, device: str) -> None:
    (tmp_path / "a").symlink_to(device)
    for path in (Path(device), tmp_path / "a"):
        with pytest.raises(UnsafeFileError, match="a device"):
            read_regular(path, limit_bytes=1000)


@posix
def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("a")
        with pytest.raises(UnsafeFileError, match="a socket"):
            open_regular(Path("a"), limit_bytes=1000)


@posix
def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UnsafeFileError, match="link"):
        open_regular(tmp_path / "a", limit_bytes=1000)


@posix
def test_a_link_is_followed_only_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "a").symlink_to("blob")
    assert read_regular(tmp_path / "a", limit_bytes=1000) == b"weights"
    with pytest.raises(UnsafeFileError, match="a link"):
        read_regular(tmp_path / "a", limit_bytes=1000, follow_links=False)


@posix
def test_a_link_that_appears_after_the_first_look_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "a").symlink_to("blob")
    monkeypatch.setattr(untrusted_files, "_refuse_irregular", lambda path, status: None)
    with pytest.raises(UnsafeFileError, match="link"):
        open_regular(tmp_path / "a", limit_bytes=1000, follow_links=False)


@linux
def test_a_file_that_names_no_size_is_held_to_its_limit() -> None:
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    with pytest.raises(UnsafeFileError, match="larger"):
        read_regular(path, limit_bytes=100)
    assert len(read_regular(path, limit_bytes=10 << 20)) > 100


def test_a_file_that_grows_is_held_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 900)
    with open_regular(tmp_path / "a", limit_bytes=1000) as file:
        with (tmp_path / "a").open("ab") as other:
            other.write(b"x" * 10_000)
        with pytest.raises(UnsafeFileError, match="larger"):
            file.read()
        file.seek(5000)
        with pytest.raises(UnsafeFileError, match="larger"):
            file.read(1)


def test_reading_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    now = time.monotonic()
    with open_regular(tmp_path / "a", limit_bytes=1000, limit_s=5.0) as file:
        monkeypatch.setattr(untrusted_files.time, "monotonic", lambda: now + 60)
        with pytest.raises(UnsafeFileError, match="too long"):
            file.read()


@linux
def test_what_is_refused_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    before = descriptors()
    for _ in range(20):
        with pytest.raises(UnsafeFileError):
            read_regular(tmp_path / "a", limit_bytes=10)
    assert descriptors() == before
