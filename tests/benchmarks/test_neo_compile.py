"""What `benchmarks.neo_compile` asks of a host, and what it keeps of a run that is cut short."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from benchmarks import neo_compile, webui
from benchmarks.neo_compile import log_facts, measure, preset_script
from benchmarks.neo_table import neo_compile_table
from benchmarks.webui_models import write_models
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from tests.support.webui_client import Drawn, WebUIError

CHOICES = ["Automatic", "Disable", "max-autotune", "max-autotune-no-cudagraphs"]
SCRIPTS = [
    {"name": "seed", "is_img2img": False, "args": [{"choices": None}, {}]},
    {"name": "torch compile", "is_img2img": True, "args": [{"choices": CHOICES}]},
    {"name": "torch compile integrated", "is_img2img": False, "args": [{"choices": CHOICES}]},
]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webui, "_POLL_S", 0.01)
    monkeypatch.setattr(webui, "_QUIET_S", 0.05)


class FakeNeo:
    """Stands for a WebUI and its process. Pictures are as bright as they have steps."""

    def __init__(self, log: Path, hangs_at: tuple[int, int] | None = None) -> None:
        self.webui, self.log = self, log
        self.asked: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}
        self.events: list[str] = []
        self.drawn: dict[tuple[int, int, int], int] = {}
        self.slow = {10: 2, 20: 1}  # steps → how many pictures of a size compile something
        self._hangs_at = hangs_at
        self.builds = 3  # looks at the status until all are done

    def start(self, limit_s: float) -> float:
        assert limit_s > 0
        self.events.append("start")
        return 1.5

    def stop(self) -> None:
        self.events.append("stop")

    def set_options(self, **options: Any) -> None:
        self.options |= options

    def get(self, path: str) -> Any:
        assert path == "/sdapi/v1/script-info"
        return SCRIPTS

    def status(self) -> dict[str, Any]:
        self.builds -= 1
        return {
            "building": self.builds > 0, "stage": "", "sizes_needed": 0,
            "line": "compiled", "reasons": [], "captures": 4,
        }  # fmt: skip

    def draw(
        self,
        accelerated: bool | Mapping[str, Any],
        path: str = "txt2img",
        scripts: Mapping[str, Any] | None = None,
        **job: Any,
    ) -> Drawn:
        self.asked.append({**job, "accelerated": accelerated, "scripts": scripts})
        if (job["width"], job["height"]) == self._hangs_at:
            time.sleep(3)
        picture = np.full((job["height"], job["width"], 3), job["steps"], np.uint8)
        seconds = 0.1 * job["steps"]
        key = (job["width"], job["height"], job["steps"])
        self.drawn[key] = self.drawn.get(key, 0) + 1
        if self.drawn[key] <= self.slow.get(job["steps"], 0):
            seconds += 50.0
        return Drawn([picture], [""], seconds)


def run(
    folder: Path, contenders: str, hangs_at: tuple[int, int] | None = None, **given: Any
) -> tuple[bool, dict[str, Any], dict[str, FakeNeo]]:
    arguments = argparse.Namespace(
        model="fake", checkpoint="fake.safetensors", lora="fine", contenders=contenders,
        sizes="64x64, 72x64", steps=10, cfg_scale=3.5, pictures=1, backend="", flags="",
        work=folder, limit_s=60.0, total_s=600.0, pause_s=0.0, lora_changes=1,
        json=folder / "fake.json",
    )  # fmt: skip
    vars(arguments).update(given)
    (folder / "prepared-fake").touch()
    made: dict[str, FakeNeo] = {}

    def make(_: argparse.Namespace, name: str) -> FakeNeo:
        made[name] = FakeNeo(folder / f"{name}.log", hangs_at)
        return made[name]

    complete = measure(arguments, make)
    return complete, json.loads(arguments.json.read_text()), made


def test_each_contender_draws_the_same_and_differs_in_what_is_on(tmp_path: Path) -> None:
    complete, figures, made = run(tmp_path, "host, ours, max-autotune")
    assert complete
    ours, host, theirs = (made[name].asked for name in ("ours", "host", "max-autotune"))
    switches = ("accelerated", "scripts")
    plain = [[{k: v for k, v in job.items() if k not in switches} for job in jobs]
             for jobs in (ours, host, theirs)]  # fmt: skip
    assert plain[0] == plain[1] == plain[2]
    assert {job["accelerated"]["enabled"] for job in ours} == {True}
    assert {job["accelerated"]["enabled"] for job in host + theirs} == {False}
    assert all(job["scripts"] == {} for job in ours + host)
    chosen = {"torch compile integrated": {"args": ["max-autotune"]}}
    assert all(job["scripts"] == chosen for job in theirs)
    events = [(row["event"], row["width"]) for row in figures["rows"]
              if row["contender"] == "ours"]  # fmt: skip
    assert events == [
        ("start", 64), ("LoRA on", 64), ("LoRA off", 64), ("new size", 72),
        ("restart", 64), ("new size after the restart", 72),
    ]  # fmt: skip
    with_lora = [job for job in host if "<lora:fine:" in job["prompt"]]
    assert len(with_lora) == 3
    assert all(neo.events == ["start", "stop", "start", "stop"] for neo in made.values())
    assert made["host"].options == {"sd_model_checkpoint": "fake.safetensors"}


def test_steps_are_the_difference_of_two_jobs(tmp_path: Path) -> None:
    _, figures, _ = run(tmp_path, "host,ours")
    rows = {(row["contender"], row["event"]): row for row in figures["rows"]}
    start = rows["host", "start"]
    assert (start["first_s"], start["second_s"], start["seconds"]) == (51.0, 51.0, 1.0)
    assert start["other_steps_first_s"] == 52.0
    assert start["drawn"] == [64, 64]
    assert start["ms_step"] == pytest.approx(100)
    assert "ms_step" not in rows["host", "LoRA on"]
    assert rows["ours", "start"]["builds_s"] > 0
    assert rows["ours", "start"]["psnr_db"] == 99
    assert figures["contenders"]["ours"]["start_s"] == 1.5


def test_a_lora_that_is_switched_several_times_has_the_median_in_the_table(tmp_path: Path) -> None:
    _, figures, made = run(tmp_path, "host", lora_changes=3)
    prompts = ["<lora:" in job["prompt"] for job in made["host"].asked]
    first_on = prompts.index(True)
    # Each row's three pictures, and then on and off twice more.
    assert prompts[first_on : first_on + 11] == [True] * 3 + [False] * 3 + [True, False] * 2 + [
        False
    ]
    rows = {row["event"]: row for row in figures["rows"]}
    for event in ("LoRA on", "LoRA off"):
        assert len(rows[event]["changes_s"]) == 3
        assert rows[event]["changes_s"][0] == rows[event]["first_s"]
    rows["LoRA on"]["changes_s"] = [9.0, 4.0, 3.0]
    (line,) = (line for line in neo_compile_table(figures).splitlines() if "with a LoRA" in line)
    assert line.split(" | ")[2].startswith("4.00, then")


def test_a_pause_comes_after_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(neo_compile.time, "sleep", slept.append)
    _, figures, made = run(tmp_path, "host", pause_s=8.0)
    assert slept.count(8.0) == made["host"].events.count("start") == 2
    assert figures["pause_s"] == 8.0


def test_a_picture_that_does_not_come_ends_its_contender_and_stays_known(tmp_path: Path) -> None:
    complete, figures, made = run(tmp_path, "host,ours", hangs_at=(72, 64), limit_s=1.0)
    assert not complete
    for name in ("host", "ours"):
        rows = [row for row in figures["rows"] if row["contender"] == name]
        events = ["start", "LoRA on", "LoRA off", "new size", "restart"]
        assert [row["event"] for row in rows] == events
        assert rows[-2]["stopped"] == "no picture within 1 s"
        assert "first_s" not in rows[-2]
        assert figures["contenders"][name]["ended"] == "no picture within 1 s"
        assert made[name].events[-1] == "stop"


def test_builds_without_an_end_do_not_end_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeNeo, "status", lambda self: {"building": True, "line": "building", "reasons": [],
                                         "captures": 0},
    )  # fmt: skip
    complete, figures, _ = run(tmp_path, "ours", limit_s=0.3)
    assert complete
    assert [row["unfinished"] for row in figures["rows"]] == ["building"] * 6
    assert all(row["builds_s"] > 0.3 and "seconds" in row for row in figures["rows"])


def test_a_later_run_adds_to_the_file_and_compares_with_the_hosts_picture(tmp_path: Path) -> None:
    run(tmp_path, "host")
    _, figures, _ = run(tmp_path, "max-autotune")
    assert {row["contender"] for row in figures["rows"]} == {"host", "max-autotune"}
    assert all(row["psnr_db"] == 99 for row in figures["rows"])


def test_the_end_of_the_whole_time_is_told(tmp_path: Path) -> None:
    complete, figures, made = run(tmp_path, "host,ours", total_s=0.0)
    assert not complete
    assert figures["rows"] == []
    assert figures["contenders"]["ours"]["ended"] == "the time of the whole run is over"
    assert not made["ours"].asked


def test_the_table_shows_each_contender_and_what_did_not_come() -> None:
    size = {"width": 64, "height": 32}
    rows = [
        {
            "contender": "host",
            "event": "start",
            **size,
            "first_s": 2.5,
            "seconds": 1.5,
            "ms_step": 80.0,
        },
        {"contender": "ours", "event": "start", **size, "first_s": 2.6, "ms_step": 40.0},
        {"contender": "ours", "event": "LoRA on", **size, "first_s": 1.5},
        {"contender": "max-autotune", "event": "start", **size, "stopped": "no picture in 9 s"},
    ]
    assert neo_compile_table({"rows": rows}).splitlines() == [
        "| | size | Neo by itself | OneDiff | max-autotune |",
        "| --- | --- | --- | --- | --- |",
        "| first picture, s | 64x32 | 2.50, then 1.50 | 2.60 | no picture in 9 s |",
        "| first one with a LoRA, s | 64x32 | - | 1.50 | - |",
        "| a step, ms | 64x32 | 80.0 | 40.0 | - |",
    ]


def test_the_table_names_all_events_of_a_run(tmp_path: Path) -> None:
    _, figures, _ = run(tmp_path, "host,ours")
    assert len(neo_compile_table(figures).splitlines()) == 2 + 6 + 2


def test_a_preset_is_found_by_its_name_and_not_by_the_scripts() -> None:
    found = preset_script(SCRIPTS, "max-autotune")
    assert found == {"torch compile integrated": {"args": ["max-autotune"]}}
    with pytest.raises(WebUIError, match="no preset 'fastest'"):
        preset_script(SCRIPTS, "fastest")
    with pytest.raises(WebUIError, match="no Torch Compile"):
        preset_script(SCRIPTS[:2], "max-autotune")


def test_the_log_tells_whether_the_model_was_compiled(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert set(log_facts(log).values()) == {0}
    log.write_text("Model Compiled (max-autotune)\nskipping cudagraphs due to x\n" * 2)
    facts = log_facts(log)
    assert (facts["compiled"], facts["without_cuda_graphs"], facts["failed"]) == (2, 2, 0)


def test_the_models_of_a_webui_are_a_checkpoint_and_a_lora(tmp_path: Path) -> None:
    checkpoint, lora = write_models("tiny", tmp_path, torch.device("cpu"), torch.float32)
    assert checkpoint.relative_to(tmp_path) == Path("Stable-diffusion/random-tiny.safetensors")
    assert lora.relative_to(tmp_path) == Path("Lora/random-tiny.safetensors")
    assert load_checkpoint(checkpoint).components["unet"].config["cross_attention_dim"] == 128
    with safe_open(str(lora), "pt") as found:
        prefixes = {key.split("_")[1] for key in found.keys()}  # noqa: SIM118
    assert prefixes == {"unet", "te1", "te2"}
    written = checkpoint.stat().st_mtime_ns
    write_models("tiny", tmp_path, torch.device("cpu"), torch.float32)
    assert checkpoint.stat().st_mtime_ns == written
