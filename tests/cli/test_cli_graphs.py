"""`onediff-ext graphs`, `warmup`, `bench` and `doctor`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onediff_ext.backends.eager import EagerBackend
from onediff_ext.backends.inductor import flash_attention
from onediff_ext.building.idle_tuning import IdleTuning
from onediff_ext.cli import doctor
from onediff_ext.store.folder import encode_schema
from tests.support.command_line import KINDS, CommandLine

pytest_plugins = ("tests.support.command_line",)


@pytest.fixture
def store(command_line: CommandLine, tmp_path: Path) -> Path:
    """A copy of the store to work on, with the graphs of one checkpoint."""
    archive = tmp_path / "all.zip"
    name = command_line.checkpoint().stem
    ended = command_line("graphs", "export", archive, "--checkpoint", name)
    assert ended.status == 0, ended
    store = tmp_path / "store"
    assert command_line("graphs", "import", archive, "--trust", store=store).status == 0
    # An archive brings no load checks: these were made here.
    shutil.copytree(command_line.store / "verdicts", store / "verdicts", dirs_exist_ok=True)
    return store


def graph_files(store: Path) -> list[Path]:
    return sorted((store / "graphs").glob("*.graph"))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def test_list(command_line: CommandLine, store: Path, tmp_path: Path) -> None:
    ended = command_line("graphs", "list", store=store)
    lines = ended.out.splitlines()
    assert lines[0].split()[:3] == ["graph", "kind", "backend"]
    assert len([line for line in lines if " eager " in line]) == KINDS
    assert f"{KINDS} graphs, " in ended.out
    assert "BasicTransformerBlock 64" in ended.out
    # A checkpoint is listed once it has used the store.
    assert command_line("warmup", "64x64", store=store).status == 0
    again = command_line("graphs", "list", store=store).out
    assert f"{command_line.checkpoint().stem} (sd1): {KINDS} kinds" in again
    empty = command_line("graphs", "list", store=tmp_path / "none")
    assert empty.status == 0
    assert empty.out.startswith("No graphs yet.")
    assert not (tmp_path / "none").exists()


def test_a_store_without_graphs_lists_no_checkpoint(
    command_line: CommandLine, tmp_path: Path
) -> None:
    command_line("warmup", "64x64", "--no-build", store=tmp_path)
    assert "sd1" not in command_line("graphs", "list", store=tmp_path).out


def test_explain_a_graph(command_line: CommandLine, store: Path) -> None:
    digest = graph_files(store)[0].stem
    ended = command_line("graphs", "explain", digest[:10].upper(), store=store)
    assert ended.status == 0
    assert digest in ended.out.splitlines()[0]
    for entry in ("  torch: ", "  backend: eager", "  device: cpu", "  origin: imported"):
        assert entry in ended.out


def test_explain_a_checkpoint(command_line: CommandLine, store: Path) -> None:
    explain = ("graphs", "explain", "-m", command_line.checkpoint(), "--backend", "eager")
    whole = command_line(*explain, store=store).out.splitlines()
    assert len(whole) == KINDS
    assert all(": loaded, " in line for line in whole)
    for path in graph_files(store)[1:]:
        path.unlink()
    lines = command_line(*explain, store=store).out.splitlines()
    assert len([line for line in lines if ": missing, " in line]) == KINDS - 1
    reasons = ("nearest stored graph", "no graph of a ")
    missing = [line for line in lines if ": missing, " in line]
    assert all(any(reason in line for reason in reasons) for line in missing)
    lines = command_line(*explain, "--dtype", "bf16", store=store).out.splitlines()
    assert all(": missing, " in line for line in lines)
    assert any("float32" in line and "bfloat16" in line for line in lines)
    assert len(graph_files(store)) == 1  # nothing was built


def test_verify(command_line: CommandLine, store: Path) -> None:
    sound = command_line("graphs", "verify", store=store)
    assert (sound.status, sound.out) == (0, f"{KINDS} sound, 0 damaged\n")
    in_header, in_payload, cut = graph_files(store)[:3]
    flip(in_header, 60)
    flip(in_payload, -5)
    cut.write_bytes(cut.read_bytes()[:-1])
    found = command_line("graphs", "verify", store=store)
    assert found.status == 1
    assert f"{KINDS - 3} sound, 3 damaged" in found.out
    assert "verify --repair" in found.out
    for path in (in_header, in_payload, cut):
        assert f"{path.name}: " in found.out
    repaired = command_line("graphs", "verify", "--repair", store=store)
    assert repaired.status == 0
    assert repaired.out.count("(deleted)") == 3
    assert f"{KINDS - 3} sound, 3 damaged" in repaired.out
    after = command_line("graphs", "verify", store=store)
    assert (after.status, after.out) == (0, f"{KINDS - 3} sound, 0 damaged\n")


def test_prune(command_line: CommandLine, store: Path) -> None:
    kept = command_line("graphs", "prune", "--older-than-days", "1", store=store)
    assert "0 graphs deleted" in kept.out
    size = sum(path.stat().st_size for path in graph_files(store))
    half = command_line("graphs", "prune", "--to-gb", f"{size / 2 / 2**30:.12f}", store=store)
    assert half.status == 0
    assert 0 < len(graph_files(store)) < KINDS
    assert sum(path.stat().st_size for path in graph_files(store)) <= size / 2
    command_line("graphs", "prune", "--to-gb", "0", store=store)
    assert graph_files(store) == []


def test_other_versions(command_line: CommandLine, store: Path) -> None:
    (store / "schema.json").write_bytes(encode_schema(99))
    assert command_line("graphs", "list", store=store).out.startswith("No graphs yet.")
    assert "0 graphs deleted" in command_line("graphs", "prune", store=store).out
    assert len(graph_files(store)) == KINDS
    ended = command_line("graphs", "prune", "--other-versions", store=store)
    assert ended.status == 0
    assert graph_files(store) == []


def test_export_and_import(command_line: CommandLine, store: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "graphs.zip", tmp_path / "other"
    exported = command_line("graphs", "export", archive, store=store)
    assert f"{KINDS} graphs in {archive}" in exported.out
    untrusted = command_line("graphs", "import", archive, store=other)
    untrusted.refused("may hold native code", "--trust")
    assert not other.exists()
    taken = command_line("graphs", "import", archive, "--trust", store=other)
    assert taken.out == f"{KINDS} graphs imported, 0 already in the store\n"
    again = command_line("graphs", "import", archive, "--trust", store=other)
    assert again.out == f"0 graphs imported, {KINDS} already in the store\n"
    explain = ("graphs", "explain", "-m", command_line.checkpoint(), "--backend", "eager")
    explained = command_line(*explain, store=other).out
    assert explained.count("never loaded on this machine; a load check comes first") == KINDS
    shutil.copytree(store / "verdicts", other / "verdicts", dirs_exist_ok=True)
    warm = command_line("warmup", "64x64", store=other)
    assert f"0 graphs built, {KINDS} loaded" in warm.out
    flip(archive, archive.stat().st_size // 2)
    third = tmp_path / "third"
    damaged = command_line("graphs", "import", archive, "--trust", store=third)
    assert damaged.status == 2
    assert not list(third.glob("graphs/*"))


def test_export_by_checkpoint(command_line: CommandLine, store: Path, tmp_path: Path) -> None:
    assert command_line("warmup", "64x64", "--ignore", "unet", store=store).status == 0
    name = command_line.checkpoint().stem
    archive = tmp_path / "vae.zip"
    ended = command_line("graphs", "export", archive, "--checkpoint", name, store=store)
    assert f"8 graphs in {archive}" in ended.out


def test_warmup(command_line: CommandLine, tmp_path: Path) -> None:
    ended = command_line("warmup", "64x64", "72x96@2")
    assert ended.status == 0
    table = ended.out.splitlines()
    assert [line.split()[:2] for line in table[1:3]] == [["64x64", "1"], ["72x96", "2"]]
    assert f"0 graphs built, {KINDS} loaded in " in ended.out
    none = command_line("warmup", "64x64", "--no-build", store=tmp_path)
    assert none.status == 1
    assert "no graph is stored, and none may be built" in none.out


def test_warmup_builds_what_a_gate_needs(command_line: CommandLine, tmp_path: Path) -> None:
    for built, loaded, more in (
        (KINDS, 0, ()),
        (2, KINDS, ("--guidance-steps", "gate:0.4")),
        (0, KINDS, ("--guidance-steps", "interval:0-0.4")),
    ):
        ended = command_line("warmup", "64x64", *more, store=tmp_path)
        assert ended.status == 0
        assert f"{built} graphs built, {loaded} loaded in " in ended.out


def test_warmup_tunes_where_the_backend_can(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = command_line("warmup", "64x64", "--tune")
    assert ended.status == 0
    assert "Nothing is tuned: the backend eager cannot do it on this device.\n" in ended.out

    def tune(tuning: IdleTuning, listen: Callable[[str, int], object]) -> int:
        for label in ("Block 64", "Block 128"):
            listen(label, 2)
        return 1

    monkeypatch.setattr(EagerBackend, "tuning", lambda self, device: "with more effort")
    monkeypatch.setattr(IdleTuning, "tune_now", tune)
    ended = command_line("warmup", "64x64", "--tune")
    assert ended.status == 0
    assert "tuning graphs 2/2: Block 128" in ended.err
    assert "1 graph tuned\n" in ended.out


def test_bench(command_line: CommandLine, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--sizes", "64x64, 72x96@2", "--rounds", "2")
    ended = command_line("bench", *sizes, "--json", figures)
    assert ended.status == 0
    loaded = json.loads(figures.read_text())
    assert set(loaded) == {"device", "versions", "model", "ready_seconds", "rows"}
    assert [row["shape"]["batch"] for row in loaded["rows"]] == [1, 2]
    for row in loaded["rows"]:
        assert row["error"] < 1e-4
        assert row["speedup"] == pytest.approx(row["eager_ms"] / row["compiled_ms"])
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_doctor(command_line: CommandLine, store: Path) -> None:
    ended = command_line("doctor", store=store)
    lines = ended.out.splitlines()
    assert all(line.startswith(("ok ", "NO ")) for line in lines)
    assert ended.status == any(line.startswith("NO ") for line in lines)
    assert any(f"graph store {store}: {KINDS} graphs" in line for line in lines)


def test_doctor_looks_for_the_compiler_that_inductor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", {"g++": "/bin/g++"}.get)
    assert doctor._compiler(windows=False) == (True, "C++ compiler: /bin/g++")
    found, line = doctor._compiler(windows=True)
    assert not found
    assert "Visual Studio" in line
    monkeypatch.setattr("shutil.which", {"cl": r"C:\cl.exe"}.get)
    assert doctor._compiler(windows=True) == (True, r"C++ compiler: C:\cl.exe")


@pytest.mark.parametrize(
    ("found", "is_for", "lines"),
    [
        ("4.0.0b36", True, [(True, "faster self-attention: flash-attn-4 4.0.0b36")]),
        (
            None,
            True,
            [(True, f"faster self-attention, which is optional: {flash_attention.INSTALL}")],
        ),
        (None, False, []),
    ],
)
def test_doctor_names_faster_self_attention_where_it_helps(
    monkeypatch: pytest.MonkeyPatch, found: str | None, is_for: bool, lines: list[tuple[bool, str]]
) -> None:
    monkeypatch.setattr(flash_attention, "version", lambda device: found)
    monkeypatch.setattr(flash_attention, "is_for", lambda device: is_for)
    assert list(doctor._flash_attention(torch.device("cuda"))) == lines


def test_doctor_finds_a_store_that_cannot_be_made(
    command_line: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    ended = command_line("doctor", store=tmp_path / "file")
    assert ended.status == 1
    assert "NO  graph store" in ended.out
