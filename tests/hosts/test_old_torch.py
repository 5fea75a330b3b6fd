"""A WebUI whose torch is too old for graphs: it draws what it would draw, and says why.

`RELEASE` stands in for the version, so that this holds on every torch; what 2.1 and 2.3 really
lack shows only where they are installed (docs/torch-versions.md).
"""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onediff_ext.backends.registry import make_backend, no_graphs_reason
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine import torch_versions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.recorder import Recorder, Recording
from onediff_ext.engine.stopwatch import Stop, stopwatch
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from onediff_ext.webui.warm_up_jobs import WarmUpJobs
from tests.support.a1111_stand_in import A1111StandIn, FakeProcessing, a1111

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> GraphsForJobs:
    if torch_versions.RELEASE >= (2, 6):
        monkeypatch.setattr(torch_versions, "RELEASE", (2, 5))
    return GraphsForJobs(A1111Host())


@pytest.fixture(params=["eager", "inductor"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> CompileOptions:
    return CompileOptions(backend=request.param, store=tmp_path, workers=1)


@pytest.fixture
def host() -> Iterator[A1111StandIn]:
    with a1111() as stand_in:
        yield stand_in


def test_pictures_are_the_models_own_and_one_line_says_why(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    expected = host.unet(), host.decode()
    p = FakeProcessing()
    graphs.begin(p, options)
    graphs.before_sampling(p)
    for _ in range(3):  # with a GPU the second is captured, and the third replayed
        assert torch.equal(host.unet(), expected[0])
        assert torch.equal(host.decode(), expected[1])
    graphs.end(p)
    status = graphs.status()
    assert status.running == ("captured" if torch.cuda.is_available() else "eager")
    assert len(status.reasons) == 1, status.reasons
    assert "graphs need 2.6" in status.line()
    assert not status.building
    assert graphs.session is not None
    assert graphs.session.missing() == []


class Again(Recording):
    """On a CPU: does the recorded work once more, into the same memory."""

    size_bytes = 100

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function, self.output = function, function()

    def replay(self) -> None:
        self.output.copy_(self._function())


class AgainRecorder(Recorder):
    """Stands in for CUDA graphs."""

    def unavailable_reason(self, device: torch.device) -> str | None:
        return None

    def stopwatch(self, device: torch.device) -> Stop:
        return stopwatch(device)

    def record(
        self, function: Callable[[], Any], device: torch.device, lasting: bool = False
    ) -> Recording:
        return Again(function)

    def forget(self) -> None:
        """Nothing was kept."""

    def release_memory(self) -> None:
        """Nothing was kept."""


def test_eager_is_captured(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    expected = host.unet(), host.unet(height=17, width=25)
    p = FakeProcessing()
    graphs.begin(p, options)
    session = graphs.session
    assert session is not None
    session.cuda_graphs = CudaGraphCache(AgainRecorder())
    graphs.before_sampling(p)
    for _ in range(5):
        assert torch.equal(host.unet(), expected[0])
        assert torch.equal(host.unet(height=17, width=25), expected[1])
    assert session.cuda_graphs.made == len(session.cuda_graphs) == 2
    status = graphs.status()
    assert status.line().startswith("captured: torch ")
    assert status.captures == 2
    graphs.end(p)


def test_warming_up_ends_without_graphs(
    host: A1111StandIn, graphs: GraphsForJobs, options: CompileOptions
) -> None:
    expected = host.unet()
    report = WarmUpJobs(graphs).run([BatchShape(64, 64, 1)], options)
    assert report is not None
    assert graphs.status().kinds_ready == 0
    assert torch.equal(host.unet(), expected)


WITHOUT = """
import tests.support.torch_2_1, importlib, pkgutil, sys, onediff_ext, pytest
for found in pkgutil.walk_packages(onediff_ext.__path__, "onediff_ext."):
    if not found.name.startswith("onediff_ext.backends.inductor.kernels."):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as exc:
            assert exc.name.split(".")[0] in ("modules", "gradio", "fastapi", "starlette"), exc
# They need operators of one's own, which torch 2.4 brought.
kernels = "onediff_ext.backends.inductor.kernels."
assert not [name for name in sys.modules if name.startswith(kernels)]
sys.exit(pytest.main(["-q", "-p", "no:randomly", "-k", "own or captured", sys.argv[1]]))
"""


def test_nothing_is_asked_for_that_torch_2_1_lacks() -> None:
    """Every module but our kernels is imported, and pictures are drawn, without what is newer."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, __file__],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_what_is_newer_is_asked_for_in_one_module() -> None:
    """An ``except`` is looked at only when something was raised, so these are searched for."""
    newer = {"OutOfMemoryError", "is_autocast_enabled", "get_autocast_dtype", "cudnn_sdp_enabled"}
    found = {
        path.name
        for path in (ROOT / "onediff_ext").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in newer | {"tree_leaves"}
    }
    assert found == {"torch_versions.py"}


def test_what_an_upgrade_brings_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "RELEASE", (2, 5))
    text = no_graphs_reason(CPU)
    assert text is not None
    gain = _median_ratio("unet-sd1-h200.json", "ours-captured-eager", "ours-exact")
    assert f"SD1.5's UNet {gain:.1f} times as fast as captured" in text
    gain = _median_ratio("vae-sdxl-h200.json", "eager", "ours-exact")
    assert f"SDXL's VAE {gain:.1f} times as fast as eager" in text.replace("\n", " ")


def test_which_release_builds_graphs_where(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = make_backend("inductor")
    monkeypatch.setattr(torch_versions, "RELEASE", (2, 7))
    assert inductor.unavailable_reason(CPU) is None
    assert "graphs need 2.8" in str(inductor.unavailable_reason(GPU))
    assert make_backend("eager").unavailable_reason(GPU) is None
    monkeypatch.setattr(torch_versions, "RELEASE", (2, 5))
    for name in ("inductor", "eager", "oneflow"):
        assert "graphs need 2.6" in str(make_backend(name).unavailable_reason(CPU))


def _median_ratio(file: str, slow: str, fast: str) -> float:
    sizes: dict[tuple[int, int], dict[str, float]] = {}
    for row in json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]:
        of = sizes.setdefault((row["width"], row["height"]), {})
        of[row["contender"]] = row["ms_median"]
    return statistics.median(of[slow] / of[fast] for of in sizes.values())
