"""The user's script: it is the README's example, runs as it is, and its rows lead in the tables."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plain, tables
from benchmarks.plain_rows import ANNOUNCED, as_used, beside_unet
from tests.support.command_line import in_child

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_example_is_the_script_that_is_measured() -> None:
    readme, script = (ROOT / "README.md").read_text(), plain.SCRIPT.read_text()
    assert readme.count(f"```python\n{script}```") == 1
    assert readme.count("```python") == 1
    assert len(script.splitlines()) < 30


def test_the_script_uses_public_names_and_tells_nothing() -> None:
    tree = ast.parse(plain.SCRIPT.read_text())
    ours = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("onediff_ext")
        for alias in node.names
    ]
    assert ours == ["compile_pipe"]


def test_contenders_differ_in_one_line() -> None:
    script = plain.SCRIPT.read_text().splitlines()
    for name in plain.CONTENDERS:
        other = plain.script_of(name).splitlines()
        compile(plain.script_of(name), name, "exec")
        assert [line for line in script if line not in other] in ([], [other_line(script)])
    assert plain.script_of("plain") == plain.SCRIPT.read_text()
    stepped = plain.script_of("plain", [2, 4])
    assert stepped.replace("[2, 4][number]", "int(steps)") == plain.SCRIPT.read_text() != stepped
    assert "compile_pipe(" not in plain.script_of("eager")


def other_line(script: list[str]) -> str:
    return next(line for line in script if line.startswith(plain.COMPILE))


class EagerHere:
    """Stands for `subprocess`: eager's scripts run in forks of this process, which has torch."""

    def run(self, command: list[str], *, cwd: Path, env: dict[str, str], **more: Any) -> None:
        if "eager" not in command[4].split(os.sep):
            subprocess.run(command, cwd=cwd, env=env, **more)
            return

        def script() -> int:
            os.chdir(cwd)
            os.environ.update(env)
            logging.getLogger().handlers.clear()  # pytest's
            sys.argv = command[2:]
            return plain.main()

        assert in_child(script) == 0


@pytest.mark.timeout(900)
def test_it_is_timed_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "plain.json"
    monkeypatch.setattr(sys, "argv", [
        "plain", "--model", "tiny", "--contenders", "eager,plain", "--sizes", "64x64, 72x64",
        "--steps", "2", "--more-steps", "2", "--pictures", "1", "--first-pictures", "3",
        "--work", str(tmp_path), "--json", str(result),
    ])  # fmt: skip
    # Graphs are not what is tested here: the backend that needs no compiler draws.
    options = 'options={"backend": "eager", "workers": 1}'
    monkeypatch.setitem(plain.CONTENDERS, "plain", f"pipe = compile_pipe(pipe, {options})")
    plain._make_model("tiny", tmp_path / "model")  # here, where torch is loaded already
    if hasattr(os, "fork"):
        monkeypatch.setattr(plain, "subprocess", EagerHere())
    assert plain.main() == 0
    figures: dict[str, Any] = json.loads(result.read_text())
    assert figures["fingerprint"]["versions"]["torch"]
    rows = [(row["contender"], row["width"], row["height"]) for row in figures["rows"]]
    assert rows == [(name, w, 64) for name in ("eager", "plain") for w in (64, 72)]
    assert all(row["picture_s"] > 0 for row in figures["rows"])
    assert [(row["more_steps"], len(row["ms_of_pairs"])) for row in figures["rows"]] == [(8, 1)] * 4
    assert figures["contenders"]["plain"]["parity"]["psnr_db_min"] > 60
    assert figures["contenders"]["plain"]["parity"]["contrast_levels_min"] > 10
    assert figures["contenders"]["eager"]["graphs_built"] == 0


def row(contender: str, ms: float, width: int = 512) -> dict[str, Any]:
    return {
        "contender": contender, "dtype": "float16", "width": width, "height": 512, "ms_median": ms,
    }  # fmt: skip


def test_plain_rows_take_the_place_of_announced_ones() -> None:
    rows = [row("eager", 40), row("ours-exact", 10), row("plain", 10.1), row("ours-fp8", 8)]
    assert as_used(rows) == [row("eager", 40), row("ours-exact", 10.1), row("ours-fp8", 8)]
    assert as_used(rows[:2]) == rows[:2]


def test_both_are_shown_where_they_differ() -> None:
    rows = [row("ours-exact", 10), row("ours-exact", 20, 1024), row("plain", 10), row("eager", 1)]
    slow = [*rows, row("plain", 20.5, 1024)]
    assert [r["contender"] for r in as_used(slow)] == [
        *["ours-exact" + ANNOUNCED] * 2, "ours-exact", "eager", "ours-exact",
    ]  # fmt: skip
    header, _, *lines = tables.forward_table({"rows": slow}).splitlines()
    assert header == "| size | eager | OneDiff | OneDiff, announced | times faster |"
    assert lines[0] == "| 512x512 | 1.0 | 10.0 | 10.0 | 0.1 |"


def test_a_step_stands_beside_the_unet_and_the_loop() -> None:
    def figures(**ms: float) -> dict[str, Any]:
        return {"rows": [
            {"contender": name, "width": 720, "height": 960, "ms_median": value}
            for name, value in ms.items()
        ]}  # fmt: skip

    header, lines = beside_unet(
        figures(**{"plain": 22.0, "plain-fp8": 17.85, "eager": 60.0}),
        figures(loop=0.5),
        figures(**{"ours-exact": 21.5, "ours-fp8": 16.5}),
    )
    assert lines == [["720x960", "0.50", "21.5", "22.0", "1.00", "16.5", "17.9", "1.05"]]
    assert len(header) == len(lines[0])
    assert header[3:5] == ["a step, exact", "over the sum"]
