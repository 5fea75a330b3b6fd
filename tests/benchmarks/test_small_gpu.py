"""What `benchmarks.small_gpu` asks of a WebUI under a memory limit, and what it keeps."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import webui
from benchmarks.small_gpu_table import small_gpu_table
from benchmarks.small_gpu_webui import measure, process_of
from tests.support.webui_client import Drawn, WebUIError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webui, "_POLL_S", 0.01)
    monkeypatch.setattr(webui, "_QUIET_S", 0.05)


class FakeWebUI:
    """Stands for a WebUI and its process.

    Args:
        brightness: Of all of its pictures.
        fails: Tells which jobs run out of memory.
        conditions: What the live tests' probe answers after a picture, if it is there.
    """

    def __init__(
        self,
        brightness: int = 100,
        fails: Callable[[dict[str, Any]], bool] | None = None,
        conditions: Mapping[str, int] | None = None,
    ) -> None:
        self.webui = self
        self.asked: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}
        self._brightness, self._fails = brightness, fails or (lambda job: False)
        self._conditions = conditions
        self.is_running = False

    def start(self, limit_s: float) -> float:
        assert limit_s > 0
        self.is_running = True
        return 1.5

    def stop(self) -> None:
        self.is_running = False

    def set_options(self, **options: Any) -> None:
        self.options |= options

    def has(self, path: str) -> bool:
        return path == "/onediff-probe/conditions" and self._conditions is not None

    def get(self, path: str) -> Any:
        if self._conditions is not None and path == "/onediff-probe/conditions":
            return self._conditions
        assert path == "/sdapi/v1/memory"
        return {"ram": {}, "cuda": {"reserved": {"peak": 7}, "events": {"oom": 0}, "system": {}}}

    def status(self) -> dict[str, Any]:
        return {
            "building": False, "stage": "", "sizes_needed": 0,
            "line": "compiled", "reasons": ["a reason"], "captures": 4,
        }  # fmt: skip

    def draw(self, accelerated: Mapping[str, Any], path: str, **job: Any) -> Drawn:
        assert self.is_running
        self.asked.append({**job, "accelerated": accelerated})
        if self._fails(job):
            raise WebUIError("/sdapi/v1/txt2img: 500 out of memory")
        picture = np.full((job["height"], job["width"], 3), self._brightness, np.uint8)
        return Drawn([picture], [""], job["width"] / 100)


def run(folder: Path, fakes: Mapping[str, FakeWebUI], **given: Any) -> tuple[bool, dict[str, Any]]:
    arguments = argparse.Namespace(
        gigabytes=8, host="a1111", model="fake", steps=10, pictures=2, soak=5, batch=1, upscale=1,
        sizes="64x64, 72x64", contenders=",".join(fakes), checkpoint="fake.safetensors",
        lora="fine", flags="--medvram-sdxl", backend="", work=folder, limit_s=60.0, replace=False,
        json=folder / "fake.json", checkout=folder / "checkout",
    )  # fmt: skip
    vars(arguments).update(given)
    passed = measure(arguments, lambda _, name: fakes[name])
    return passed, json.loads(arguments.json.read_text())


def test_both_contenders_draw_the_same(tmp_path: Path) -> None:
    fakes = {"host": FakeWebUI(), "ours": FakeWebUI(brightness=101)}
    lora = tmp_path / "checkout" / "models" / "Lora" / "fine.safetensors"
    lora.parent.mkdir(parents=True)
    save_file({"up": torch.ones(2, dtype=torch.bfloat16), "alpha": torch.ones(1)}, lora)
    passed, figures = run(tmp_path, fakes)
    assert passed
    host, ours = (
        [{k: v for k, v in job.items() if k != "accelerated"} for job in fakes[name].asked]
        for name in ("host", "ours")
    )
    assert host == ours
    assert {job["accelerated"]["enabled"] for job in fakes["host"].asked} == {False}
    assert {job["accelerated"]["enabled"] for job in fakes["ours"].asked} == {True}
    # Each size without and with the LoRA, one more and two timed ones, the soak.
    seen = [(job["width"], "<lora:fine:" in job["prompt"]) for job in fakes["ours"].asked]
    assert seen[:4] == [(64, False), (72, False), (64, True), (72, True)]
    assert seen[4:7] == [(64, False)] * 3
    assert seen[7:] == [(64, False), (72, False), (64, True), (72, True), (64, False)]
    assert all(
        fake.options == {"sd_model_checkpoint": "fake.safetensors"} for fake in fakes.values()
    )
    rows = {(row["contender"], row["width"]): row for row in figures["rows"]}
    assert rows["ours", 64]["picture_s"] == 0.64
    assert "picture_s" not in rows["ours", 72]
    assert rows["ours", 72]["soak_lora_s"] == 0.72
    assert (rows["host", 72]["first_s"], rows["host", 72]["first_lora_s"]) == (0.72, 0.72)
    assert rows["ours", 64]["lowest_psnr_db"] == pytest.approx(48.13, abs=0.01)
    facts = figures["contenders"]["ours"]
    assert (facts["pictures"], facts["failed"], facts["compared"]) == (12, 0, 12)
    assert facts["reserved"] == {"peak": 7}
    assert facts["reasons"] == ["a reason"]
    assert facts["lora"] == {"name": "fine", "dtypes": ["BF16", "F32"]}
    assert figures["flags"] == ["--medvram-sdxl"]


def test_rows_say_how_prompts_went_into_the_model(tmp_path: Path) -> None:
    fakes = {"host": FakeWebUI(conditions={"1": 2, "2": 9}), "ours": FakeWebUI()}
    _, figures = run(tmp_path, fakes)
    rows = {(row["contender"], row["width"]): row for row in figures["rows"]}
    # The first size has eight pictures, the other one four.
    assert rows["host", 64]["conditions"] == {"1": 16, "2": 72}
    assert rows["host", 72]["conditions"] == {"1": 8, "2": 36}
    assert "conditions" not in rows["ours", 64]


def test_a_picture_that_fails_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    fakes = {"ours": FakeWebUI(fails=lambda job: job["width"] == 72)}
    passed, figures = run(tmp_path, fakes)
    assert not passed
    facts = figures["contenders"]["ours"]
    assert (facts["pictures"], facts["failed"], facts["compared"]) == (12, 4, 0)
    assert facts["soak"]["pictures"] == 5
    assert all("out of memory" in error for error in facts["errors"])
    assert not fakes["ours"].is_running


def test_the_table_has_the_first_size_and_what_failed(tmp_path: Path) -> None:
    fakes = {"host": FakeWebUI(), "ours": FakeWebUI(fails=lambda job: job["width"] == 72)}
    _, webui_run = run(tmp_path, fakes)
    rows = [
        {"contender": name, "width": 64, "height": 64, "picture_s": seconds,
         "seconds": [seconds] * 2, "out_of_memory": 0}
        for name, seconds in (("eager", 4.0), ("ours", 2.0))
    ]  # fmt: skip
    own_run = {
        **{"gigabytes": 6, "host": "diffusers", "offload": "model", "rows": rows, "model": "sd15"},
        "job": {"batch_size": 2, "hr_scale": 1.5},
    }
    assert small_gpu_table([webui_run, own_run]).splitlines()[2:] == [
        "| 8 GB | A1111 --medvram-sdxl | fake | 64x64 | 0.64 | 0.64 | 1.00 | 12, 4 |",
        "| 6 GB | diffusers, model offloading | SD1.5 | 2 of 64x64, hires-fix to 96x96"
        " | 4.00 | 2.00 | 2.00 | 2, 0 |",
    ]


def test_hires_fix_and_a_batch_are_part_of_each_job(tmp_path: Path) -> None:
    fakes = {"host": FakeWebUI()}
    run(tmp_path, fakes, batch=2, upscale=1.5, lora=None)
    for job in fakes["host"].asked:
        assert (job["batch_size"], job["enable_hr"], job["hr_scale"]) == (2, True, 1.5)
        assert "<lora" not in job["prompt"]


def test_the_webui_runs_with_a_limited_gpu(tmp_path: Path) -> None:
    """The launcher's own arguments, folder and name are those of a plain start."""
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "launch.py").write_text(
        "import json, sys; import beside; print(json.dumps([__name__, sys.argv]))"
    )
    given = argparse.Namespace(
        gigabytes=8.0, host="forge", model="m", flags="--x y", port=7,
        checkout=tmp_path, work=tmp_path, python_path=None,
    )  # fmt: skip
    command = process_of(given, "ours")._command
    said = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert command[1:4] == ["-m", "benchmarks.limited_memory", "8.0"]
    assert json.loads(said.stdout) == [
        "__main__",
        ["launch.py", "--api", "--port", "7", "--x", "y"],
    ]
    assert said.stderr == ""
    assert sys.executable == command[0]
