"""What tuning has brought is kept with a kind's build record, as long as its graph is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onediff_ext.store import BuildRecords, GraphLibrary, Tuning

DIGEST = "d" * 64


@pytest.fixture
def records(tmp_path: Path) -> BuildRecords:
    return BuildRecords(GraphLibrary(tmp_path, 10**6).folder)


def add(records: BuildRecords, machine: str, at: float = 1.0, problem: str = "") -> Tuning:
    tuning = Tuning("max_autotune_gemm=True", 2.0, 1.5, problem, at)
    records.record_tuning(DIGEST, "Block 64", machine=machine, tuning=tuning)
    return tuning


def test_each_machine_has_its_own(records: BuildRecords) -> None:
    found = {name: add(records, name, at) for at, name in enumerate(("m1", "m2"))}
    assert records.read(DIGEST).tunings == found
    records.record_load_check(DIGEST, "Block 64", machine="m1", payload_sha256="0" * 64)
    assert records.read(DIGEST).tunings == found
    again = add(records, "m1", 5.0, problem="It gives NaN.")
    assert records.read(DIGEST).tunings == {**found, "m1": again}


def test_a_graph_that_is_deleted_is_tuned_again_later(records: BuildRecords) -> None:
    add(records, "m1")
    records.record_eviction(DIGEST, "least recently used")
    assert records.read(DIGEST).tunings == {}


def test_those_of_many_machines_are_forgotten_in_turn(records: BuildRecords) -> None:
    for at in range(20):
        add(records, f"m{at}", at)
    assert set(records.read(DIGEST).tunings) == {f"m{at}" for at in range(4, 20)}


@pytest.mark.parametrize("wrong", [None, [], {"m1": {}}, {"m1": {"settings": 1}}])
def test_a_damaged_one_costs_the_record_only(records: BuildRecords, wrong: object) -> None:
    add(records, "m1")
    path = records.folder.build_records / f"{DIGEST}.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "tunings": wrong}))
    assert records.read(DIGEST).tunings == {}
