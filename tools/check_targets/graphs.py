"""The kernels that Inductor generates for each kind of block of the shipped architectures.

A kind is exported on the CPU, as for a build. Its graph gets our kernels, and Inductor generates
code for a GPU that is not here. The code's Triton kernels are compiled; operators that remain
PyTorch's own are listed.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from onediff_ext.core.words import first_line
from tools.check_targets.pretended_gpu import pretended_gpu
from tools.check_targets.targets import BF16_SINCE, Target, compiled

UNETS = ("sd1", "sd2", "sdxl", "sdxl-refiner")
# One block of each kind is enough: a model's other blocks have the same kinds.
TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "sd35-medium": {"num_layers": 3, "dual_attention_layers": (0,)},
    "sd35-large": {"num_layers": 2},
    "flux": {"num_layers": 1, "num_single_layers": 1},
    "flux2-klein-4b": {"num_layers": 1, "num_single_layers": 1},
    "chroma": {"num_layers": 1, "num_single_layers": 1},
    "z-image": {"n_layers": 1, "n_refiner_layers": 1},
    "qwen-image": {"num_layers": 1},
    "lumina2": {"num_layers": 1, "num_refiner_layers": 1},
}
MODELS = (*UNETS, "vae", *TRANSFORMERS)

_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)
_OPERATOR = re.compile(
    r"^ +(?:\w+ = )?(?:extern_kernels\.(\w+)|torch\.ops\.aten\.(\w+)\.\w+)\(", re.MULTILINE
)


@dataclass(frozen=True)
class GraphTarget:
    """One kind's graph, generated for one generation.

    Args:
        model, label: Of the kind.
        capability: Compute capability times ten.
        kernels: Its Triton kernels, compiled.
        operators: What PyTorch computes in it, such as matrix products and convolutions.
        error: Why no code was generated; empty otherwise.
    """

    model: str
    label: str
    capability: int
    kernels: tuple[Target, ...] = ()
    operators: tuple[str, ...] = ()
    error: str = ""


class Generated(BaseException):
    """Ends Inductor when its code is there. No ``except Exception`` catches it.

    Args:
        code: Python source with the kernels in it.
    """

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code


def programs(model: str, dtype: torch.dtype) -> dict[str, bytes]:
    """Export all kinds of a model of full width with random weights.

    Args:
        model: One of `MODELS`.
        dtype: Of its weights.

    Returns:
        By label: programs as a build worker gets them.
    """
    from onediff_ext import compile_pipe
    from onediff_ext.hosts.diffusers.compile import compiled_state
    from onediff_ext.hosts.diffusers.probe import probe

    pipe = _pipe(model, dtype)
    with tempfile.TemporaryDirectory() as store:
        compile_pipe(pipe, options={"store": store, "build": "never", "backend": "eager"})
        probe(pipe)
        state = compiled_state(pipe)
        assert state is not None
        found: dict[str, bytes] = {}
        seen: Counter[str] = Counter()
        for kind in state.session.kinds:
            seen[kind.label] += 1
            number = seen[kind.label]
            label = kind.label if number == 1 else f"{kind.label} #{number}"
            found[label] = kind.prepare_export(torch.device("cpu"))()
    return found


def graphs_of_generation(
    exported: Mapping[str, Mapping[str, bytes]], capability: int
) -> list[GraphTarget]:
    """Generate the code of kinds for one generation, and compile its kernels.

    torch keeps what it was told of a GPU, so each generation needs a process of its own.

    Args:
        exported: By model: what `programs` returned.
        capability: Compute capability times ten.
    """
    known: dict[str, Target] = {}
    with pretended_gpu(capability):
        return [
            _compiled_graph(model, label, program, capability, known)
            for model, kinds in exported.items()
            for label, program in kinds.items()
        ]


def _compiled_graph(
    model: str, label: str, program: bytes, capability: int, known: dict[str, Target]
) -> GraphTarget:
    try:
        code = generated_code(program)
    except Exception as exc:
        error = f"{type(exc).__name__}: {first_line(str(exc))}"
        return GraphTarget(model, label, capability, error=error)
    kernels = []
    for name, source in kernels_in(code):
        key = source.replace(name, "kernel")  # many kinds have it
        if key not in known:
            known[key] = _compiled_kernel(name, source, capability)
        kernels.append(known[key])
    return GraphTarget(model, label, capability, tuple(kernels), operators_in(code))


def kernels_in(code: str) -> list[tuple[str, str]]:
    """Return the name and the source of each Triton kernel in Inductor's code.

    Args:
        code: From `generated_code`.
    """
    return _KERNEL.findall(code)


def operators_in(code: str) -> tuple[str, ...]:
    """Return the names of PyTorch's own operators that Inductor's code calls.

    Args:
        code: From `generated_code`.
    """
    return tuple(sorted({extern or aten for extern, aten in _OPERATOR.findall(code)}))


def generated_code(program: bytes) -> str:
    """Return the Python code that Inductor makes of a program, within `pretended_gpu`.

    Args:
        program: From `programs`.

    Raises:
        BackendError: Inductor cannot.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    from onediff_ext.backends.inductor import backend, standalone_artefact
    from onediff_ext.engine.export.exporter import load_program

    gpu = torch.device("cuda", 0)

    def generate(graph: Any) -> None:
        code, _ = graph.codegen()
        raise Generated(getattr(code, "value", code))

    def build(graph_module: GraphModule, fakes: list[Any]) -> bytes:
        _use_efficient_attention(graph_module)
        return standalone_artefact.build_artefact(graph_module, fakes)

    with (
        mock.patch.object(GraphLowering, "compile_to_module", generate),
        mock.patch.object(backend, "build_artefact", build),
        config.patch(force_disable_caches=True),
    ):
        try:
            backend.InductorBackend().build(load_program(program, gpu), gpu)
        except Generated as done:
            return done.code
    raise RuntimeError("Inductor has not generated any code.")


def _use_efficient_attention(graph_module: GraphModule) -> None:
    """Name the attention that PyTorch would choose on a GPU; fake tensors alone do not tell."""
    aten = torch.ops.aten
    for node in graph_module.graph.find_nodes(
        op="call_function", target=aten.scaled_dot_product_attention.default
    ):
        query, key, value, *more = node.args
        mask = more[0] if more else None
        with graph_module.graph.inserting_before(node):
            pair = graph_module.graph.call_function(
                aten._scaled_dot_product_efficient_attention.default,
                (query, key, value, mask, False, 0.0, False),
                {"scale": node.kwargs.get("scale")},
            )
            first = graph_module.graph.call_function(operator.getitem, (pair, 0))
        node.replace_all_uses_with(first)
        graph_module.graph.erase_node(node)
    graph_module.recompile()


def _compiled_kernel(name: str, source: str, capability: int) -> Target:
    """Compile one of the code's kernels as Inductor would, for all of its launch settings."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_heuristics
    from triton.compiler import ASTSource

    tuner = getattr(PyCodeCache.load(source), name)
    assert isinstance(tuner, triton_heuristics.CachingAutotuner)
    found = []
    for settings in tuner.configs:
        meta = tuner._create_compile_meta(settings)
        tree = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = tuner._create_compile_options(settings, meta)
        found.append(compiled(name, str(settings), capability, tree, options))
    return max(found, key=lambda target: (bool(target.error), target.spilled_bytes))


def _pipe(model: str, dtype: torch.dtype) -> Any:
    from benchmarks.models import make_unet, make_vae
    from benchmarks.transformer_models import make_transformer

    cpu = torch.device("cpu")
    if model == "vae":
        return SimpleNamespace(vae=make_vae("sd1", cpu, dtype))
    if model in TRANSFORMERS:
        made = make_transformer(model, cpu, dtype, **TRANSFORMERS[model])
        return SimpleNamespace(transformer=made)
    return SimpleNamespace(unet=make_unet(model, cpu, dtype))


def compiled_graphs(
    models: Sequence[str], dtype: torch.dtype, capabilities: Sequence[int]
) -> Iterator[GraphTarget]:
    """Compile all kinds of models for generations, each in a process of its own.

    Args:
        models: Of `MODELS`.
        dtype: float16 or bfloat16.
        capabilities: Compute capabilities times ten. Those without bfloat16 are left out for it.
    """
    since = BF16_SINCE if dtype is torch.bfloat16 else 0
    exported = {model: programs(model, dtype) for model in models}
    wanted = [capability for capability in capabilities if capability >= since]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        context.Pool(None, _keep_files_in, (folder,), maxtasksperchild=1) as processes,
    ):
        for made in processes.imap(partial(graphs_of_generation, exported), wanted):
            yield from made


def _keep_files_in(folder: str) -> None:
    """Have Inductor and Triton write to a folder, before they are imported."""
    tempfile.tempdir = folder
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = str(Path(folder, name))
