"""Result files: what is added, replaced, kept and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import OtherMachineError, merge, read_result, write_result
from benchmarks.streams import gather


def figures(
    *rows: dict, gpu: str = "NVIDIA H200", date: str = "2026-11-21", **more: object
) -> dict:
    fingerprint = {"date": date, "gpu": gpu, "versions": {"torch": "2.11.0"}}
    return {"what": "x", "model": "sdxl", "fingerprint": fingerprint, "rows": list(rows), **more}


def row(contender: str, width: int = 512, ms: float = 1.0, dtype: str = "float16") -> dict:
    return {
        "contender": contender, "dtype": dtype, "width": width, "height": 512, "ms_median": ms,
    }  # fmt: skip


def test_a_new_file_is_what_was_measured() -> None:
    new = figures(row("eager"))
    assert merge(None, new) == new


def test_rows_of_other_contenders_sizes_and_dtypes_are_kept() -> None:
    old = figures(row("eager"), row("ours"), row("ours", 1024), row("ours", dtype="bfloat16"))
    merged = merge(old, figures(row("ours", ms=2.0), row("peer")))
    found = [(r["contender"], r["width"], r["dtype"], r["ms_median"]) for r in merged["rows"]]
    assert found == [
        ("eager", 512, "float16", 1.0),
        ("ours", 512, "float16", 2.0),
        ("ours", 1024, "float16", 1.0),
        ("ours", 512, "bfloat16", 1.0),
        ("peer", 512, "float16", 1.0),
    ]


def test_contenders_are_kept_and_replaced_alike() -> None:
    old = figures(contenders={"ours": {"built": 3}, "peer": {"graphs": 1}})
    merged = merge(old, figures(contenders={"ours": {"built": 4}}))
    assert merged["contenders"] == {"ours": {"built": 4}, "peer": {"graphs": 1}}


def test_what_was_stopped_takes_no_figure_away() -> None:
    old = figures(row("peer"), contenders={"peer": {"graphs": 1}})
    stopped = [{k: v for k, v in row("peer", w).items() if k != "ms_median"} for w in (512, 1024)]
    new = figures(*({**r, "stopped": "late"} for r in stopped), contenders={"peer": {"ended": "x"}})
    merged = merge(old, new)
    assert merged["rows"] == [row("peer"), {**stopped[1], "stopped": "late"}]
    assert merged["contenders"] == {"peer": {"graphs": 1, "ended": "x"}}
    failed = figures({**stopped[0], "failed": "wrong"})
    assert [r.get("failed") for r in merge(old, failed)["rows"]] == ["wrong"]


def test_another_day_is_the_same_machine() -> None:
    merged = merge(figures(row("a")), figures(row("b"), date="2026-11-22"))
    assert len(merged["rows"]) == 2
    assert merged["fingerprint"]["date"] == "2026-11-22"


@pytest.mark.parametrize("changed", [{"gpu": "NVIDIA A10"}, {"model": "sd1"}])
def test_another_machine_or_model_is_refused(changed: dict) -> None:
    other = {**figures(row("b")), **changed}
    if "gpu" in changed:
        other = figures(row("b"), **changed)
    with pytest.raises(OtherMachineError, match=next(iter(changed))):
        merge(figures(row("a")), other)


def test_another_setting_is_refused_where_it_decides() -> None:
    old, new = figures(batch_size=1), figures(batch_size=4)
    assert merge(old, new)["batch_size"] == 4
    with pytest.raises(OtherMachineError, match="batch_size"):
        merge(old, new, same=("batch_size",))


def test_shapes_as_keys_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "kernels.json"
    kernel = {"contender": "ours", "kernel": "geglu", "shape": (2, 4)}
    write_result(path, figures(kernel))
    key = ("contender", "kernel", "shape")
    merged = merge(read_result(path), figures({**kernel, "us": 3.0}), key=key)
    assert [r.get("us") for r in merged["rows"]] == [3.0]
    assert read_result(tmp_path / "none.json") is None
    assert [p.name for p in path.parent.iterdir()] == ["kernels.json"]


def stream_of(tmp_path: Path, *entries: dict, tail: str = "") -> Path:
    path = tmp_path / "stream.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in entries) + tail, encoding="utf-8")
    return path


BEGUN = {"begun": {"width": 1024, "height": 512}}


def test_a_process_that_ended_well_gives_what_it_wrote(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, BEGUN, {"row": row("peer", 1024)}, {"contenders": {"peer": {}}})
    found = gather(stream, "", ["peer"], "float16")
    assert [r["ms_median"] for r in found["rows"]] == [1.0]
    assert "measured" in found["rows"][0]
    assert found["contenders"] == {"peer": {}}


def test_a_stopped_process_keeps_its_rows_and_says_where_it_was(tmp_path: Path) -> None:
    first = {"begun": {"width": 512, "height": 512}}
    stream = stream_of(tmp_path, first, {"row": row("peer")}, BEGUN, tail='{"row": {"conte')
    found = gather(stream, "stopped", ["peer"], "float16", " bf16")
    assert [(r["width"], r.get("stopped")) for r in found["rows"]] == [
        (512, None),
        (1024, "stopped"),
    ]
    assert found["contenders"]["peer bf16"]["ended"] == "stopped"


def test_a_process_that_never_began_has_no_rows(tmp_path: Path) -> None:
    found = gather(tmp_path / "none", "crashed", ["peer"], "float16")
    assert found["rows"] == []
    assert found["contenders"]["peer"]["ended"] == "crashed"
