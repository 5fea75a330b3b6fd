"""Stores that other users own or may write: no native code is loaded from them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from onediff_ext.core import ownership
from onediff_ext.core.errors import StoreError, UntrustedGraphError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store import BuildRecords, GraphLibrary, StoredGraph
from onediff_ext.store.permissions import TRUST_VARIABLE

pytestmark = pytest.mark.skipif(os.name == "nt", reason="owners and modes are POSIX's")
needs_root = pytest.mark.skipif(
    os.name != "nt" and os.geteuid() != 0, reason="only root gives files to other users"
)
KEY = KindKey({"class": "ResnetBlock2D"})
STRANGER = 54321
MB = 1 << 20


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GraphLibrary:
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.setattr(ownership, "_CONTAINER_MARKS", ())
    (tmp_path / "store").mkdir(mode=0o700)
    return GraphLibrary(tmp_path / "store", MB)


def put(library: GraphLibrary) -> StoredGraph:
    return library.put(KEY, b"code", label="L", backend="b", build_seconds=1, details={})


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def again(library: GraphLibrary) -> GraphLibrary:
    return GraphLibrary(library.folder.root, MB)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_we_make_is_ours_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        library = GraphLibrary(tmp_path / "new" / "store", MB)
        graph = put(library)
    finally:
        os.umask(before)
    for path in (library.folder.root, *library.folder.root.rglob("*")):
        assert mode(path) & 0o077 == 0, path
    assert again(library).get(KEY) is not None
    assert mode(graph.path) == 0o600


@pytest.mark.parametrize(
    "name", [".", "graphs", "verdicts", "tmp", "locks", "checkpoints", "compiler-files"]
)
@pytest.mark.parametrize("bits", [0o777, 0o757])
def test_folders_of_ours_are_closed_again(library: GraphLibrary, name: str, bits: int) -> None:
    put(library)
    (library.folder.root / name).chmod(bits)
    assert again(library).get(KEY) is not None
    assert mode(library.folder.root / name) == bits & ~0o022


@pytest.mark.parametrize("bits", [0o666, 0o646])
def test_a_graph_that_all_may_write_is_not_loaded(library: GraphLibrary, bits: int) -> None:
    graph = put(library)
    graph.path.chmod(bits)
    other = again(library)
    assert other.get(KEY) is None
    assert "not trusted (the file may be written by everybody)" in other.explain(KEY)
    assert f"chmod go-w '{graph.path}'" in other.explain(KEY)
    assert graph.path.exists()
    with pytest.raises(UntrustedGraphError):
        other.read_payload(StoredGraph(graph.header, graph.path, 1, 1.0))
    assert [problem.reason for problem in other.verify()] == [
        "the file may be written by everybody"
    ]
    assert [problem.remedy for problem in other.verify(repair=True)] == ["deleted"]
    put(other)
    assert again(library).get(KEY) is not None


@needs_root
def test_a_graph_of_another_user_is_not_loaded(library: GraphLibrary) -> None:
    graph = put(library)
    os.chown(graph.path, STRANGER, STRANGER)
    assert library.get(KEY) is None
    assert f"belongs to user {STRANGER}" in library.explain(KEY)
    put(library)  # takes its place
    assert library.get(KEY) is not None


@needs_root
@pytest.mark.parametrize("name", [".", "graphs", "verdicts", "compiler-files", "locks"])
def test_a_folder_of_another_user_is_refused_with_what_mends_it(
    library: GraphLibrary, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = put(library)
    folder = library.folder.root / name
    os.chown(folder, STRANGER, STRANGER)
    other = again(library)
    assert other.get(KEY) is None
    assert f"belongs to user {STRANGER}" in other.explain(KEY)
    with pytest.raises(UntrustedGraphError) as caught:
        put(other)
    assert f"sudo chown -R {os.geteuid()} '{folder}'" in caught.value.hint
    monkeypatch.setenv(TRUST_VARIABLE, str(graph.path.parent))  # of another folder
    if name != "graphs":
        assert again(library).get(KEY) is None
    monkeypatch.setenv(TRUST_VARIABLE, str(library.folder.root))
    assert again(library).get(KEY) is not None
    monkeypatch.delenv(TRUST_VARIABLE)
    os.chown(folder, os.geteuid(), os.getegid())
    assert again(library).get(KEY) is not None


@needs_root
def test_a_record_of_another_user_is_not_believed(library: GraphLibrary) -> None:
    build_records = BuildRecords(library.folder)
    build_records.record_load_check(KEY.digest, "L", machine="m", payload_sha256="0" * 64)
    path = library.folder.build_records / f"{KEY.digest}.json"
    assert build_records.load_check(KEY.digest, "m", "0" * 64) is not None
    os.chown(path, STRANGER, STRANGER)
    assert build_records.load_check(KEY.digest, "m", "0" * 64) is None


@needs_root
def test_root_by_sudo_uses_its_users_store(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(library)
    for path in (library.folder.root, *library.folder.root.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    assert again(library).get(KEY) is None
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    assert again(library).get(KEY) is not None


@needs_root
def test_root_in_a_container_uses_the_folder_that_was_put_into_it(
    library: GraphLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = put(library)
    for path in (library.folder.root, *library.folder.root.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    monkeypatch.setattr(ownership, "_CONTAINER_MARKS", (tmp_path,))
    assert again(library).get(KEY) is not None
    os.chown(graph.path, STRANGER + 1, STRANGER)  # a third user's
    assert again(library).get(KEY) is None


@needs_root
def test_a_disk_that_gives_all_files_to_one_user_is_ours(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share with `root_squash`: what root makes belongs to nobody."""
    put(library)
    for path in (library.folder.root, *library.folder.root.rglob("*")):
        os.chown(path, 65534, 65534)
    assert again(library).get(KEY) is None
    make = ownership.tempfile.TemporaryFile

    def squashed(dir: Path) -> object:
        made = make(dir=dir)
        os.fchown(made.fileno(), 65534, 65534)
        return made

    monkeypatch.setattr(ownership.tempfile, "TemporaryFile", squashed)
    assert again(library).get(KEY) is not None


@needs_root
def test_roots_own_store_serves_others_read_only(library: GraphLibrary) -> None:
    status = os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, 1, 0, 0, 0))
    before = os.geteuid()
    os.seteuid(STRANGER)
    try:
        assert ownership.foreign_owner(status) == ""
    finally:
        os.seteuid(before)


def status_of(uid: int, gid: int, bits: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | bits, 0, 0, 1, uid, gid, 1, 0, 0, 0))


@pytest.mark.parametrize(
    ("gid", "members", "expected"),
    [
        (1000, [], ""),  # the user's own group
        (1000, ["ann"], ""),
        (1000, ["bob"], "group ann"),
        (44, [], "group video"),
        (44, ["ann"], "group video"),
        (0, [], ""),  # root's: OpenShift runs all that it runs in it
    ],
)
def test_a_group_of_ones_own_counts_as_oneself(
    monkeypatch: pytest.MonkeyPatch, gid: int, members: list[str], expected: str
) -> None:
    import grp
    import pwd

    names = {1000: "ann", 44: "video", 0: "root"}
    ann = SimpleNamespace(pw_name="ann", pw_uid=1000, pw_gid=1000)
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=names[gid], gr_mem=members)
    )
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: ann)
    monkeypatch.setattr(pwd, "getpwall", lambda: [ann])
    ownership._has_one_user.cache_clear()
    assert ownership.other_writers(status_of(1000, gid, 0o664)) == expected
    assert ownership.other_writers(status_of(1000, gid, 0o644)) == ""
    ownership._has_one_user.cache_clear()


def test_a_group_of_the_same_name_with_two_users_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import grp
    import pwd

    ann = SimpleNamespace(pw_name="ann", pw_uid=1000, pw_gid=1000)
    bob = SimpleNamespace(pw_name="bob", pw_uid=1001, pw_gid=1000)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="ann", gr_mem=[]))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: ann)
    monkeypatch.setattr(pwd, "getpwall", lambda: [ann, bob])
    ownership._has_one_user.cache_clear()
    assert ownership.other_writers(status_of(1000, 1000, 0o664)) == "group ann"
    ownership._has_one_user.cache_clear()


def test_users_without_a_name_have_groups_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp

    def unknown(gid: int) -> object:
        raise KeyError(gid)

    monkeypatch.setattr(grp, "getgrgid", unknown)
    assert ownership.other_writers(status_of(4711, 4711, 0o664)) == ""
    assert ownership.other_writers(status_of(4711, 100, 0o664)) == "group 100"


def test_a_disk_without_permissions_is_refused_unless_one_says_so(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(library)
    library.folder.graphs.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)  # as on exFAT
    assert again(library).get(KEY) is None
    with pytest.raises(StoreError) as caught:
        put(library)
    assert TRUST_VARIABLE in caught.value.hint
    monkeypatch.setenv(TRUST_VARIABLE, str(library.folder.root))
    assert again(library).get(KEY) is not None


def test_the_root_may_be_a_volume_that_all_may_write(
    library: GraphLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that belongs to root with mode 0777, such as an emptyDir of Kubernetes."""
    library.folder.root.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)
    put(library)
    assert again(library).get(KEY) is not None


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    library = GraphLibrary(tmp_path / "store", MB)
    put(library)
    assert again(library).get(KEY) is not None
