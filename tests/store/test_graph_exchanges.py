"""Graph exchanges: graphs are added once, and leases hold without locks."""

from __future__ import annotations

import ntpath
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onediff_ext.core import ownership
from onediff_ext.core.errors import OptionError, UnsafeFileError, UntrustedGraphError
from onediff_ext.store.exchange_address import open_exchange
from onediff_ext.store.fsspec_exchange import FsspecExchange
from onediff_ext.store.graph_exchange import GraphExchange
from onediff_ext.store.memory_exchange import MemoryExchange

pytest.importorskip("fsspec", reason="the extra cluster is not installed")

DIGEST, OTHER = "a" * 64, "b" * 64


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


MakeExchange = Callable[[], GraphExchange]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "folder", "bucket"])
def exchange_of(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> MakeExchange:
    """Makes each process's own view of one exchange."""
    if request.param == "memory":
        shared = MemoryExchange(30.0, clock)
        return lambda: shared
    url = str(tmp_path / "x") if request.param == "folder" else f"memory://{tmp_path.name}/x"
    return lambda: FsspecExchange(url, 30.0, clock)


def test_a_graph_is_published_once_for_its_machine_tag(
    exchange_of: MakeExchange,
) -> None:
    ours, theirs = exchange_of(), exchange_of()
    assert ours.digests("tag") == set()
    assert ours.fetch("tag", DIGEST) is None
    assert ours.publish("tag", DIGEST, b"graph")
    assert not theirs.publish("tag", DIGEST, b"later")
    assert theirs.digests("tag") == {DIGEST}
    assert theirs.fetch("tag", DIGEST) == b"graph"
    assert theirs.digests("other machines") == set()
    assert theirs.fetch("other machines", DIGEST) is None


def test_one_holder_has_a_lease(exchange_of: MakeExchange) -> None:
    ours, theirs = exchange_of(), exchange_of()
    assert ours.lease("tag", DIGEST, "a")
    assert not theirs.lease("tag", DIGEST, "b")
    assert ours.lease("tag", DIGEST, "a")  # renews
    assert theirs.lease("tag", OTHER, "b")
    ours.release("tag", DIGEST, "a")
    assert theirs.lease("tag", DIGEST, "b")


def test_a_lease_that_nobody_renews_ends(exchange_of: MakeExchange, clock: Clock) -> None:
    ours, theirs = exchange_of(), exchange_of()
    assert ours.lease("tag", DIGEST, "a")
    assert not theirs.lease("tag", DIGEST, "b")
    clock.now_s += 20
    assert ours.lease("tag", DIGEST, "a")
    assert not theirs.lease("tag", DIGEST, "b")
    clock.now_s += 20
    assert not theirs.lease("tag", DIGEST, "b")
    clock.now_s += 31
    assert theirs.lease("tag", DIGEST, "b")
    assert not ours.lease("tag", DIGEST, "c")


def test_of_many_that_come_at_once_at_most_one_builds(exchange_of: MakeExchange) -> None:
    holders = [f"worker-{number}" for number in range(8)]
    for _ in range(5):
        barrier, won = threading.Barrier(len(holders)), list[str]()

        def claim(holder: str, barrier: threading.Barrier = barrier, won: list[str] = won) -> None:
            exchange = exchange_of()
            barrier.wait(20)
            try:
                has_it = exchange.lease("tag", DIGEST, holder)
            finally:
                barrier.wait(20)
            if has_it:
                won.append(holder)
                exchange.release("tag", DIGEST, holder)

        threads = [threading.Thread(target=claim, args=(holder,)) for holder in holders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) <= 1
    assert exchange_of().lease("tag", DIGEST, "later")


def test_a_holder_whose_lease_was_taken_over_learns_it_at_the_next_renewal(tmp_path: Path) -> None:
    slow, fast = Clock(), Clock()
    ours = FsspecExchange(str(tmp_path / "x"), 30.0, slow)
    theirs = FsspecExchange(str(tmp_path / "x"), 30.0, fast)
    assert ours.lease("tag", DIGEST, "a")
    assert not theirs.lease("tag", DIGEST, "b")
    fast.now_s += 31  # ours was suspended
    assert theirs.lease("tag", DIGEST, "b")
    held = [ours.lease("tag", DIGEST, "a"), theirs.lease("tag", DIGEST, "b")]
    assert held.count(True) == 1


def test_a_lost_worker_gives_all_its_leases_back() -> None:
    exchange = MemoryExchange()
    assert exchange.lease("tag", DIGEST, "a")
    assert exchange.lease("tag", OTHER, "a")
    exchange.release_all("a")
    assert exchange.lease("tag", DIGEST, "b")
    assert exchange.lease("tag", OTHER, "b")


def test_a_url_needs_trust(tmp_path: Path) -> None:
    with pytest.raises(UntrustedGraphError, match="native code"):
        open_exchange("memory://graphs", trust=False)
    open_exchange("memory://graphs", trust=True)
    with pytest.raises(OptionError, match="cannot be opened"):
        open_exchange("nowhere://graphs", trust=True)


class Windows(SimpleNamespace):
    """`os` as fsspec sees it on Windows."""

    sep, path = "\\", ntpath

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


@pytest.mark.parametrize(
    ("address", "folder"),
    [
        ("C:\\graphs", "C:/graphs"),
        ("file:///C:/graphs", "C:/graphs"),
        ("file://C:/graphs/", "C:/graphs"),
        ("\\\\server\\graphs", "//server/graphs"),
        ("memory://graphs", None),
    ],
)
def test_a_folder_of_windows(
    monkeypatch: pytest.MonkeyPatch, address: str, folder: str | None
) -> None:
    from fsspec.implementations import local

    monkeypatch.setattr(local, "os", Windows())
    assert FsspecExchange(address).folder == (None if folder is None else Path(folder))


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("protocol", ["", "file://", "local://"])
def test_a_folder_of_ours_is_closed_to_others(tmp_path: Path, protocol: str) -> None:
    folder = tmp_path / "graphs"
    folder.mkdir()
    folder.chmod(0o777)
    open_exchange(f"{protocol}{folder}", trust=False)
    assert folder.stat().st_mode & 0o022 == 0


needs_modes = pytest.mark.skipif(os.name == "nt", reason="owners and modes are POSIX's")
needs_root = pytest.mark.skipif(
    os.name != "nt" and os.geteuid() != 0, reason="only root gives files to other users"
)
STRANGER = 54321


def stored_in(folder: Path) -> Path:
    """The file of a graph that was published to a folder."""
    assert open_exchange(str(folder), trust=False).publish("tag", DIGEST, b"code")
    return folder / "graphs" / "tag" / f"{DIGEST}.graph"


@needs_modes
def test_a_graph_that_all_may_write_is_not_fetched(tmp_path: Path) -> None:
    stored_in(tmp_path).chmod(0o666)
    with pytest.raises(UntrustedGraphError, match="may be written by everybody"):
        open_exchange(str(tmp_path), trust=False).fetch("tag", DIGEST)
    assert open_exchange(str(tmp_path), trust=True).fetch("tag", DIGEST) == b"code"


@needs_root
@pytest.mark.parametrize("name", ["tag", f"tag/{DIGEST}.graph"])
def test_what_another_user_left_in_the_folder_is_not_fetched(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have put it there before the folder was closed."""
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setattr(ownership, "_CONTAINER_MARKS", ())
    stored_in(tmp_path)
    os.chown(tmp_path / "graphs" / name, STRANGER, STRANGER)
    with pytest.raises(UntrustedGraphError, match=f"belongs to user {STRANGER}"):
        open_exchange(str(tmp_path), trust=False).fetch("tag", DIGEST)


@needs_modes
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_we_publish_is_ours_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        exchange = open_exchange(str(tmp_path / "new"), trust=False)
        path = stored_in(tmp_path / "new")
        assert exchange.lease("tag", OTHER, "a")
    finally:
        os.umask(before)
    for made in (path, *path.parents[:3]):
        assert made.stat().st_mode & 0o022 == 0, made
    assert exchange.fetch("tag", DIGEST) == b"code"


@needs_modes
def test_a_pipe_in_a_graphs_place_is_not_waited_for(tmp_path: Path) -> None:
    path = stored_in(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UnsafeFileError):
        open_exchange(str(tmp_path), trust=False).fetch("tag", DIGEST)
