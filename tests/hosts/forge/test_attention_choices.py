"""The functions of attention that Forge, reForge and Neo choose among, on stand-ins.

A host takes xformers, FlashAttention or SageAttention where these packages are installed, and
PyTorch's kernel by a flag of its command line.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.forge_attention import EXACT
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.forge_stand_in import ForgeStandIn
from tests.support.ldm_stand_in import written_in

# Blocks of the stand-in's UNet that run as graphs: three residual ones and a transformer's.
ALL, BUT_ATTENTION = 4, 3
# How the names of functions for one head over all cells end.
IN_THE_VAE = {"forge": "attention_single_head_spatial", "neo": "attention_vae"}

Choose = Callable[[str, str], None]


class Result(NamedTuple):
    """One step, how many of its blocks ran as graphs, and a picture."""

    step: torch.Tensor
    calls: int
    picture: torch.Tensor


Drawn = Callable[[], Result]


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    """The store of `test_forge.py`, whose kinds are the same."""
    store = tmp_path_factory.getbasetemp() / "forge-store"
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture
def attention(host: ForgeStandIn) -> Any:
    """The host's module of attention."""
    name = "ldm_patched.ldm.modules" if host.name == "reforge" else "backend"
    return host.classes.modules[f"{name}.attention"]


@pytest.fixture
def choose(host: ForgeStandIn, attention: Any, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Has UNets or VAEs use another function of the host's, of which a name is given."""

    def chosen(block: str, name: str) -> None:
        home = host.classes.modules[getattr(host.classes, block).__module__]
        if block == "AttnBlock":
            variable = f"attention_function{IN_THE_VAE[host.name].removeprefix('attention')}"
        else:
            variable = "optimized_attention" if host.name == "reforge" else "attention_function"
        function = written_in(named(getattr(home, variable), name), attention.__name__)
        function.__name__ = name
        for module, attribute in ((attention, name), (attention, variable), (home, variable)):
            monkeypatch.setattr(module, attribute, function, raising=False)

    return chosen


@pytest.fixture
def drawn(host: ForgeStandIn, graphs: GraphsForJobs, job: Any) -> Drawn:
    """Draws and decodes as a job, which has its graphs already."""

    def draw() -> Result:
        for _ in range(2):  # builds, then uses
            p = job()
            before = sum(kind.calls for kind in graphs.session.kinds)
            step = host.draw()
            calls = sum(kind.calls for kind in graphs.session.kinds) - before
            found = Result(step, calls, host.decode())
            graphs.end(p)
        return found

    return draw


def named(own: Callable[..., Any], name: str) -> FunctionType:
    """A function of this module that calls another one, under its name."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    function.__name__ = name
    assert isinstance(function, FunctionType)
    return function


def reasons(graphs: GraphsForJobs) -> list[str]:
    return [fallback.reason for fallback in graphs.session.fallbacks()]


@pytest.mark.parametrize("name", sorted(EXACT))
def test_functions_that_compute_what_pytorchs_kernel_does(
    host: ForgeStandIn, graphs: GraphsForJobs, choose: Choose, drawn: Drawn, name: str
) -> None:
    choose("BasicTransformerBlock", name)
    expected = host.draw()
    found = drawn()
    assert found.calls == ALL
    assert reasons(graphs) == []
    assert torch.allclose(found.step, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["attention_sage", "attention_of_tomorrow"])
def test_functions_of_the_host_that_quantize_or_are_unknown(
    host: ForgeStandIn, graphs: GraphsForJobs, choose: Choose, drawn: Drawn, name: str
) -> None:
    choose("BasicTransformerBlock", name)
    expected = host.draw()
    found = drawn()
    assert found.calls == BUT_ATTENTION
    assert any(f"attention by {name} is not known to be exact" in r for r in reasons(graphs))
    assert torch.allclose(found.step, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_another_extensions_function_of_a_known_name(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    attention: Any,
    choose: Choose,
    drawn: Drawn,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    choose("BasicTransformerBlock", name)
    monkeypatch.setattr(attention, name, named(getattr(attention, name), name))
    assert drawn().calls == BUT_ATTENTION
    assert any(f"attention by {name}" in reason for reason in reasons(graphs))


def test_another_extensions_function_in_the_place_of_a_known_one_everywhere(
    host: ForgeStandIn,
    graphs: GraphsForJobs,
    attention: Any,
    drawn: Drawn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = host.classes.modules[host.classes.BasicTransformerBlock.__module__]
    variable = "optimized_attention" if host.name == "reforge" else "attention_function"
    own = getattr(home, variable)
    function = named(lambda *args, **kwargs: 2 * own(*args, **kwargs), own.__name__)
    for module, name in ((attention, own.__name__), (attention, variable), (home, variable)):
        monkeypatch.setattr(module, name, function)
    expected = host.draw()
    found = drawn()
    assert found.calls == BUT_ATTENTION
    assert any(f"attention by {own.__name__}" in reason for reason in reasons(graphs))
    assert torch.allclose(found.step, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("library", ["normal", "pytorch", "xformers", "sage"])
def test_functions_for_one_head_in_the_vae(
    host: ForgeStandIn, graphs: GraphsForJobs, choose: Choose, drawn: Drawn, library: str
) -> None:
    if host.name == "reforge":
        pytest.skip("it keeps the VAE's attention on each block (test_forge.py)")
    name = f"{library}_{IN_THE_VAE[host.name]}"
    choose("AttnBlock", name)
    expected = host.decode()
    found = drawn()
    refused = [reason for reason in reasons(graphs) if f"attention by {name}" in reason]
    assert bool(refused) is (library == "sage")
    assert len(reasons(graphs)) == len(refused)
    assert torch.allclose(found.picture, expected, atol=1e-5, rtol=1e-4)
