"""Machines that share graphs: one builds each kind, the others fetch it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onediff_ext.building.shared_graphs import SharedGraphs
from onediff_ext.core.errors import StoreError
from onediff_ext.engine.machine import machine_digest
from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.session.session import Session
from onediff_ext.store import GraphExchange, StoreBusyError
from onediff_ext.store.fsspec_exchange import FsspecExchange
from onediff_ext.store.memory_exchange import MemoryExchange
from tests.support.session_fixtures import SmallUNet

TIMEOUT_S = 60
CPU = torch.device("cpu")
TAG = machine_digest(CPU)

Join = Callable[..., tuple[Session, SharedGraphs]]


@pytest.fixture
def join(open_session, instant_workers, tmp_path) -> Join:
    """A machine with a store of its own that joins an exchange."""

    def join(exchange: GraphExchange, name: str) -> tuple[Session, SharedGraphs]:
        session = open_session(store=tmp_path / name)
        context = session.build_context
        shared = SharedGraphs(
            exchange, name, session.library, context.build_records, session.key_entries(CPU), CPU
        )
        context.share_graphs(shared)
        return session, shared

    return join


def draw_until_built(session: Session, rounds: int = 1) -> None:
    unet = SmallUNet()
    compile_pipe(unet.pipe, session=session)
    for _ in range(rounds):
        unet()
        assert session.wait_for_builds(TIMEOUT_S)


def test_fetched_graphs_are_loaded_before_a_block_asks(join: Join) -> None:
    exchange = MemoryExchange()
    first, _ = join(exchange, "a")
    draw_until_built(first)
    late, shared = join(exchange, "b")
    late.read_ahead.start(lambda: (), CPU)  # this store knows no checkpoint yet
    late.read_ahead.add(shared.pull(), CPU)
    digests = {kind.key.digest for kind in first.kinds}
    graphs = {digest: late.read_ahead.take(digest, CPU) for digest in digests}
    assert digests
    assert None not in graphs.values()
    assert late.read_ahead.take(next(iter(digests)), CPU) is None  # each one once


def test_what_one_machine_built_the_others_draw_with_at_once(join: Join) -> None:
    exchange = MemoryExchange()
    first, _ = join(exchange, "a")
    draw_until_built(first)
    assert first.count("built") == len(first.kinds) > 0
    assert set(exchange.builds.values()) == {1}
    late, shared = join(exchange, "b")
    assert len(shared.pull()) == len(first.kinds)
    draw_until_built(late)
    assert (late.count("built"), late.count("loaded")) == (0, len(first.kinds))
    assert set(exchange.builds.values()) == {1}


def test_a_kind_that_another_machine_builds_is_fetched_when_it_is_there(join: Join) -> None:
    exchange = MemoryExchange()
    first, _ = join(exchange, "a")
    draw_until_built(first)
    other, _ = join(exchange, "b")  # it pulls nothing ahead
    draw_until_built(other)
    assert (other.count("built"), other.count("loaded")) == (0, len(first.kinds))


def test_who_has_no_lease_does_not_build_and_draws_on(join: Join) -> None:
    exchange = MemoryExchange()
    session, shared = join(exchange, "b")
    digest = "a" * 64
    assert exchange.lease(TAG, digest, "a")
    with pytest.raises(StoreBusyError), shared.claim(digest):
        pass
    exchange.release(TAG, digest, "a")
    shared._refused_at.clear()
    with shared.claim(digest):
        assert not exchange.lease(TAG, digest, "a")
    assert exchange.lease(TAG, digest, "a")
    assert session.count("built") == 0


def test_a_filled_store_is_published(join: Join) -> None:
    first, _ = join(MemoryExchange(), "a")
    draw_until_built(first)
    exchange = MemoryExchange()
    _, shared = join(exchange, "a")  # the same store in a later run
    assert shared.push() == len(first.kinds)
    assert shared.push() == 0
    assert exchange.digests(TAG) == {kind.key.digest for kind in first.kinds}


def test_a_graph_that_crashed_here_is_not_tried_again_because_others_share_it(join: Join) -> None:
    exchange = MemoryExchange()
    session, shared = join(exchange, "a")
    draw_until_built(session)
    graph = session.library.entries()[0]
    records, machine = session.build_context.build_records, TAG
    content = graph.header.payload_sha256
    records.record_load_check(
        graph.digest, graph.label, machine=machine, payload_sha256=content, problem="it crashed"
    )
    session.library.delete(graph.digest)  # such as for lack of room
    assert graph.digest in shared.pull()
    check = records.load_check(graph.digest, machine, content)
    assert check is not None
    assert check.problem == "it crashed"


def test_a_damaged_graph_is_not_taken(join: Join) -> None:
    exchange = MemoryExchange()
    exchange.publish(TAG, "a" * 64, b"no graph")
    session, shared = join(exchange, "a")
    assert shared.pull() == []
    assert session.library.entries() == []
    with pytest.raises(StoreError):
        session.library.add_graph_file("a" * 64, b"no graph")


@pytest.mark.parametrize("damage", ["emptied", "cut short", "swapped"])
def test_a_damaged_graph_is_built_once_more_and_takes_its_place(
    join: Join, tmp_path: Path, damage: str
) -> None:
    """A power failure or a disk may do that. Each machine would build it for itself, always."""
    pytest.importorskip("fsspec", reason="the extra cluster is not installed")

    def exchange() -> FsspecExchange:
        return FsspecExchange(str(tmp_path / "exchange"))

    first, _ = join(exchange(), "a")
    draw_until_built(first)
    paths = sorted((tmp_path / "exchange").rglob("*.graph"))
    contents = {path: path.read_bytes() for path in paths}
    damaged = {"emptied": b"", "cut short": contents[paths[0]][:-5], "swapped": contents[paths[1]]}
    paths[0].write_bytes(damaged[damage])
    second, _ = join(exchange(), "b")
    draw_until_built(second)
    assert second.count("built") == 1
    third, _ = join(exchange(), "c")
    draw_until_built(third)
    assert (third.count("built"), third.count("loaded")) == (0, len(first.kinds))


def test_an_exchange_that_is_away_costs_the_sharing_only(join: Join) -> None:
    class Away(MemoryExchange):
        def _fail(self, *arguments: str) -> bool:
            raise OSError("no route to the bucket")

        digests = fetch = publish = lease = release = _fail  # type: ignore[assignment]

    session, shared = join(Away(), "a")
    assert shared.pull() == []
    draw_until_built(session)
    assert session.count("built") == len(session.kinds)
