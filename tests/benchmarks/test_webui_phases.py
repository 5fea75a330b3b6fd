"""Where a picture's seconds go: phases within phases, and functions of a host as it is imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.phases_table import phases_table
from benchmarks.webui import breakdown
from benchmarks.webui_phases import PHASES, REQUEST, SAMPLER, Stopwatch, TimingFinder

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Time that passes when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> Callable[..., float]:
        def working(*_: Any) -> float:
            self.now += seconds
            return seconds

        return working


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written() -> list[dict[str, float]]:
    return []


@pytest.fixture
def stopwatch(clock: Clock, written: list[dict[str, float]]) -> Stopwatch:
    return Stopwatch(lambda: None, written.append, clock)


def test_inner_phases_do_not_count_for_the_outer_one(
    stopwatch: Stopwatch, clock: Clock, written: list[dict[str, float]]
) -> None:
    vae = stopwatch.timed("VAE", clock.work(2))

    def request() -> str:
        clock.work(1)()
        vae()
        vae()
        clock.work(4)()
        stopwatch.add("UNet", 3, out_of=REQUEST)
        return "picture"

    assert stopwatch.timed(REQUEST, request)() == "picture"
    assert written == [{REQUEST: 2.0, "VAE": 4.0, "UNet": 3.0}]
    vae()  # of no request
    assert len(written) == 1
    stopwatch.timed(REQUEST, clock.work(1))()
    assert written[1] == {REQUEST: 1.0}


def test_a_failed_picture_is_written_too(
    stopwatch: Stopwatch, clock: Clock, written: list[dict[str, float]]
) -> None:
    def fail() -> None:
        clock.work(1)()
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        stopwatch.timed(REQUEST, stopwatch.timed("VAE", fail))()
    assert written == [{REQUEST: 0.0, "VAE": 1.0}]


HOST = """
class Api:
    def text2imgapi(self, request):
        return sample(request)

def sample(request):
    return request * 2
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_timed_host").mkdir()
    (tmp_path / "a_timed_host" / "__init__.py").write_text("")
    (tmp_path / "a_timed_host" / "api.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_timed_host.api"
    for name in [name for name in sys.modules if name.startswith("a_timed_host")]:
        del sys.modules[name]


def test_functions_are_timed_from_their_import_on(
    host: str, stopwatch: Stopwatch, written: list[dict[str, float]], monkeypatch: Any
) -> None:
    phases = {host: {REQUEST: ("Api.text2imgapi", "Api.gone"), "VAE": ("sample", "Gone.method")}}
    monkeypatch.setattr(sys, "meta_path", [TimingFinder(stopwatch, phases), *sys.meta_path])
    api = importlib.import_module(host)
    assert api.Api().text2imgapi(4) == 8
    assert [set(one) for one in written] == [{REQUEST, "VAE"}]
    assert api.Api.text2imgapi.__name__ == "text2imgapi"
    assert not hasattr(api, "Gone")


LAUNCHER = """
import sys
from modules.api.api import Api
print(sys.argv[1:], Api().text2imgapi())
"""
MODULES = {
    "modules/__init__.py": "",
    "modules/api/__init__.py": "",
    "modules/api/api.py": """
from modules import processing
class Api:
    def text2imgapi(self):
        return processing.process_images_inner()
""",
    "modules/shared.py": """
import types, torch
class Wrapper: diffusion_model = torch.nn.Linear(2, 2)
sd_model = types.SimpleNamespace(model=Wrapper())
""",
    "modules/processing.py": """
import time, torch
from modules import shared
class StableDiffusionProcessingTxt2Img:
    def sample(self):
        for _ in range(3):
            shared.sd_model.model.diffusion_model(torch.zeros(1, 2))
        time.sleep(0.02)
def process_images_inner():
    StableDiffusionProcessingTxt2Img().sample()
    return "picture"
""",
}


def test_a_launcher_runs_with_it(tmp_path: Path) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "launch.py").write_text(LAUNCHER)
    command = [
        sys.executable,
        "-m",
        "benchmarks.webui_phases",
        "phases.jsonl",
        "launch.py",
        "--api",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['--api'] picture\n"
    [phases] = [json.loads(line) for line in (tmp_path / "phases.jsonl").read_text().splitlines()]
    assert phases.keys() == {REQUEST, "rest of the host", SAMPLER, "UNet"}
    assert 0.015 < phases[SAMPLER] < 5
    assert 0 < phases["UNet"] < 5


def test_phases_have_one_place_each() -> None:
    for module, phases in PHASES.items():
        names = [name for found in phases.values() for name in found]
        assert len(names) == len(set(names)), module


def test_the_breakdown_is_of_medians_and_adds_what_is_outside() -> None:
    phases = [{"UNet": 1.0, "VAE": 0.5}, {"UNet": 3.0}, {"UNet": 2.0, "VAE": 0.25}]
    found = breakdown(phases, [2.0, 3.5, 2.5])
    assert found == {"UNet": 2.0, "the API's answer": 0.5, "VAE": 0.25}
    assert list(found) == ["UNet", "the API's answer", "VAE"]
    with pytest.raises(ValueError, match="2 lines for 1 pictures"):
        breakdown(phases[:2], [1.0])


def test_the_table_says_each_second_once() -> None:
    phases = {"UNet": 0.6, "sampler": 0.1, "PNG": 0.2, "the API's answer": 0.05, "scripts": 0.01}
    row = {"contender": "eager", "width": 512, "height": 448, "task": "txt2img", "seconds": 1.0}
    rows = [
        row | {"phases": phases | {"moving models": 0.03, "freeing memory": 0.01}},
        row | {"phases": phases, "task": "img2img"},
        row | {"phases": phases, "contender": "ours-exact"},
        row | {"phases": phases | {"UNet": 0.5}, "contender": "ours-fp8", "seconds": 0.9},
    ]
    first = {"host": "neo", "fingerprint": {"gpu": "NVIDIA H100 80GB HBM3"}, "rows": rows[:3]}
    second = {"host": "a1111", "fingerprint": {"gpu": "NVIDIA H200"}, "rows": rows[3:]}
    assert phases_table([first, second]).splitlines()[2:] == [
        "| Forge Neo | H100 | 512x448 | without | 1000 | 600 | 100 | 0 | 200 | 50 | 10 | 40 |",
        "| Forge Neo | H100 | 512x448 | with | 1000 | 600 | 100 | 0 | 200 | 50 | 10 | 0 |",
        "| A1111 | H200 | 512x448 | with, fp8 | 900 | 500 | 100 | 0 | 200 | 50 | 10 | 0 |",
    ]
