"""What every WebUI host does with its VAE works with graphs under it: another dtype after NaN,
tiles after running out of memory. OneDiff neither hides the reason nor takes part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support import a1111_stand_in, forge_stand_in
from tests.support.running_stand_in import running_stand_in


class NansException(Exception):  # noqa: N818 - the host's name for it
    """A1111's own check found NaN."""


class RunningHost:
    """A host that draws with its VAE as the real ones do.

    Args:
        stand_in: The fake host.
        name: Which one.
    """

    def __init__(self, stand_in: Any, name: str) -> None:
        self._stand_in, self.name = stand_in, name
        self.checked = 0

    @property
    def decoder(self) -> Any:
        if self.name == "a1111":
            return self._stand_in.model.first_stage_model.decoder
        return self._stand_in.engine.forge_objects.vae.first_stage_model.decoder

    def mode(self) -> AbstractContextManager[None]:
        """The context in which the host's jobs run."""
        return torch.no_grad() if self.name == "a1111" else torch.inference_mode()

    def convert(self, dtype: torch.dtype) -> None:
        """Bring the decoder into another dtype."""
        with self.mode():
            self.decoder.to(dtype)

    def replace_bias(self, bias: torch.Tensor) -> None:
        """Give the decoder's first convolution another bias."""
        with self.mode():
            self.decoder.conv_in.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        with self.mode():
            pixels: torch.Tensor = self.decoder(z.to(next(self.decoder.parameters()).dtype))
            return pixels.clone()

    def decode_checked(self, z: torch.Tensor, retry: torch.dtype) -> torch.Tensor:
        """A1111's: the pixels are looked at, and the VAE is converted when there is NaN."""
        pixels = self.decode(z)
        self.checked += 1
        if pixels.isnan().any():
            self.convert(retry)
            pixels = self.decode(z)
            if pixels.isnan().any():
                raise NansException
        return pixels

    def decode_tiled(self, z: torch.Tensor) -> torch.Tensor:
        """Forge's: once whole, and in tiles when that runs out of memory."""
        try:
            return self.decode(z)
        except torch.OutOfMemoryError:
            columns = z.split(4, dim=3)
            return torch.cat([self.decode(column) for column in columns], dim=3)

    def job(self) -> Any:
        stand_in = a1111_stand_in if self.name == "a1111" else forge_stand_in
        return stand_in.FakeProcessing()


@pytest.fixture(params=["a1111", *sorted(forge_stand_in.ADAPTERS)])
def host(request: pytest.FixtureRequest) -> Iterator[RunningHost]:
    with running_stand_in(request.param) as stand_in:
        yield RunningHost(stand_in, request.param)


@pytest.fixture
def graphs(host: RunningHost, tmp_path_factory: pytest.TempPathFactory) -> Any:
    adapters = {"a1111": A1111Host, **forge_stand_in.ADAPTERS}
    graphs = GraphsForJobs(adapters[host.name]())
    options = CompileOptions(
        backend="eager", build="wait", store=tmp_path_factory.mktemp("store"), workers=1
    )
    ignores = frozenset({"unet", "controlnet"})
    job = host.job()
    graphs.begin(job, options, ignores)
    graphs.before_sampling(job)
    yield graphs
    graphs.end(job)
    graphs.close()


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    from tests.support.quick_builds import quick_builds

    with quick_builds():
        yield


def latents(width: int = 8) -> torch.Tensor:
    return torch.randn(1, 4, 8, width, generator=torch.Generator().manual_seed(2))


def ready(host: RunningHost, graphs: Any) -> list[Any]:
    """Graphs under the decoder, compared with eager."""
    for _ in range(2):
        host.decode(latents())
    kinds: list[Any] = graphs.session.kinds
    assert kinds
    assert {kind.state for kind in kinds} == {KindState.READY}
    return kinds


def own(host: RunningHost, graphs: Any, z: torch.Tensor) -> torch.Tensor:
    """The host's own pixels, no graph in between."""
    attachment = next(a for a in graphs.models.attached if a.component.name == "vae_decoder")
    with attachment.component.paused():
        return host.decode(z)


def test_nan_reaches_the_hosts_check_and_another_dtype_names_other_kinds(
    host: RunningHost, graphs: Any
) -> None:
    kinds = ready(host, graphs)
    z = latents()
    expected = own(host, graphs, z)
    good = host.decoder.conv_in.bias.detach().clone()
    host.replace_bias(torch.full_like(good, torch.nan))
    with pytest.raises(NansException):
        host.decode_checked(z, retry=torch.bfloat16)
    host.replace_bias(good.to(torch.bfloat16))
    assert {kind.state for kind in kinds} == {KindState.READY}  # no graph is to blame
    for _ in range(3):  # builds or waits for something to compare, compares, uses
        found = host.decode(z)
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected).norm() < 0.05 * expected.norm()
    now = graphs.session.kinds
    dtypes = [kind.key.entries["weight dtype"] for kind in now]
    assert dtypes.count("float32") == dtypes.count("bfloat16") == len(kinds)
    assert {kind.state for kind in now} == {KindState.READY}
    assert graphs.session.fallbacks() == []
    host.convert(torch.float32)  # and back
    assert (host.decode(z) - expected).norm() < 0.02 * expected.norm()
    assert len(graphs.session.kinds) == len(now)


@pytest.mark.parametrize("error", ["of torch", "of a library"])
def test_running_out_of_memory_in_a_graph_leads_to_the_hosts_tiles(
    host: RunningHost, graphs: Any, error: str
) -> None:
    kinds = ready(host, graphs)
    z, count = latents(12), len(kinds)
    expected = torch.cat([own(host, graphs, part) for part in z.split(4, dim=3)], dim=3)
    own_error = torch.OutOfMemoryError("CUDA out of memory: the model's own")
    raised = own_error if error == "of torch" else RuntimeError("CUDNN_STATUS_ALLOC_FAILED")
    own_graphs = [kind.graph for kind in kinds]

    def limited(graph: Any) -> Any:
        def run(tensors: Any) -> Any:
            if max(t.shape[3] for t in tensors if t.ndim == 4) > 4:
                raise raised
            return graph(tensors)

        return run

    for kind in kinds:
        kind.graph = limited(kind.graph)

    def limit(_: Any, args: Any) -> None:  # nothing fits, graph or not
        if args[0].shape[3] > 4:
            raise own_error

    handle = host.decoder.conv_out.register_forward_pre_hook(limit)
    found = host.decode_tiled(z)
    handle.remove()
    for kind, graph in zip(kinds, own_graphs, strict=True):
        kind.graph = graph
    assert torch.allclose(found, expected, atol=1e-5)
    assert {kind.state for kind in kinds} == {KindState.READY}
    assert len(graphs.session.kinds) == count  # tiles are sizes like any others


def test_what_would_fit_without_graphs_is_drawn(host: RunningHost, graphs: Any) -> None:
    kinds = ready(host, graphs)
    z = latents(9)
    expected = own(host, graphs, z)

    def no_room(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory: a copy in another layout")

    kept = SimpleNamespace(graph=kinds[0].graph)
    kinds[0].graph = no_room
    found = host.decode_tiled(z)
    kinds[0].graph = kept.graph
    assert torch.equal(found, expected)  # whole: not even the host's tiles were needed
    assert "VAE decoder: memory is short" in graphs.status().reasons
