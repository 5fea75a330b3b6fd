"""Ways to run a step of a UNet or a transformer: eager, ours, and the peers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.diffusers.compile import (
    compile_pipe,
    compiled_state,
    new_session,
    one_picture,
)
from onediff_ext.hosts.diffusers.compile_module import compile_module
from onediff_ext.hosts.diffusers.probe import denoiser_inputs, probe
from onediff_ext.session.session import Session

Step = Any
"""A callable that takes the model's arguments."""

# By default Dynamo silently runs a code object eager after 8 graphs.
PEER_RECOMPILE_LIMIT = 64


class Contender(ABC):
    """One way to run a step.

    Attributes:
        name: Its name in rows; ours begin with "ours-".
        static: Compiles for one size, which takes a minute, so only some sizes are measured.
    """

    name: str
    static = False

    @property
    def is_peer(self) -> bool:
        """Whether it runs in a separate process, because compilers share state within a process."""
        return True

    def missing(self) -> str:
        """Return why it cannot run here (a missing package), or ""."""
        return ""

    @abstractmethod
    def make(self, model: Any, store: Path) -> Step:
        """Return a callable that takes the model's arguments; the weights are shared."""

    def figures(self) -> dict[str, Any]:
        """Return further figures, such as graphs built and CUDA graphs."""
        return {}


class Eager(Contender):
    """The unchanged model."""

    name = "eager"
    is_peer = False

    def make(self, model: Any, store: Path) -> Step:
        return model


class Ours(Contender):
    """Compiled graphs of blocks, CUDA graphs, or both."""

    is_peer = False

    def __init__(self, name: str, *, tuned: bool = False, **options: Any) -> None:
        self.name, self._tuned, self._options = name, tuned, options

    def make(self, model: Any, store: Path) -> Step:
        # Tuned graphs would take the place of those of other contenders.
        store = store / self.name if self._tuned else store
        self.session = new_session(CompileOptions(store=store, **self._options))
        part = "transformer" if _is_transformer(model) else "unet"
        pipe = SimpleNamespace(**{part: model})
        start = time.perf_counter()
        compile_pipe(pipe, session=self.session)
        probe(pipe)
        self._ready_s = time.perf_counter() - start
        if self._tuned:
            probe(pipe)  # what is not proved is not tuned
            self.session.tuning.tune_now(lambda label, needed: print(f"tuned {label}", flush=True))
            self._tuned_s = time.perf_counter() - start - self._ready_s
        probe(pipe)
        # A host announces its pictures. Weights are compared, and the text KV cache is computed,
        # once for each. All steps belong to one picture here.
        self._picture = one_picture(pipe)
        self._picture.__enter__()
        return model

    def figures(self) -> dict[str, Any]:
        figures = figures_of(self.session, self._ready_s)
        if self._tuned:
            events = self.session.event_log.events
            figures["tuned_s"] = self._tuned_s
            figures["tuned"] = [event.line() for event in events if event.what.endswith("tuned")]
        return figures


class Plain(Contender):
    """A user's own calls: the public API, and nothing told of where pictures begin."""

    is_peer = False
    _STEPS = 20

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self._options = name, options
        self._timestep: torch.Tensor | None = None
        self._schedule: list[torch.Tensor] = []

    def make(self, model: Any, store: Path) -> Step:
        start = time.perf_counter()
        compile_module(model, options={"store": store, **self._options})
        state = compiled_state(model)
        assert state is not None
        self.session = state.session
        small = denoiser_inputs(model, torch.Generator().manual_seed(0))
        assert small is not None
        for _ in range(2):  # finds and builds the kinds, and compares them
            model(**small)
            self.session.wait_for_builds()
        self._ready_s = time.perf_counter() - start

        def step(**inputs: Any) -> Any:
            name = "timestep" if "timestep" in inputs else "t"
            of_size = inputs[name]
            if not self._schedule or of_size is not self._timestep:  # as `set_timesteps`
                self._timestep = of_size
                steps = torch.stack([of_size] * self._STEPS)
                self._schedule = list(steps.unbind())
            return model(**{**inputs, name: self._schedule.pop(0)})

        return step

    def figures(self) -> dict[str, Any]:
        return figures_of(self.session, self._ready_s)


class _Dynamo(Contender):
    """Contenders that compile through Dynamo."""

    def figures(self) -> dict[str, Any]:
        from torch._dynamo.utils import counters

        return {
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
        }

    @staticmethod
    def _raise_limits() -> None:
        torch._dynamo.config.recompile_limit = PEER_RECOMPILE_LIMIT
        torch._dynamo.config.accumulated_recompile_limit = 16 * PEER_RECOMPILE_LIMIT


class Compiled(_Dynamo):
    """`torch.compile` of the whole model."""

    def __init__(self, name: str, *, dynamic: bool = False, **arguments: Any) -> None:
        self.name, self.static = name, not dynamic
        self._arguments: dict[str, Any] = {"dynamic": dynamic, **arguments}

    def make(self, model: Any, store: Path) -> Step:
        self._raise_limits()
        compiled = torch.compile(model, **self._arguments)

        def step(**inputs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(**inputs)

        return step


class RepeatedBlocks(_Dynamo):
    """diffusers' own regional compilation, also for models that diffusers names no blocks of.

    Args:
        name: Its name in rows.
        dynamic: As for `torch.compile`; None is what diffusers' documentation shows.
        captured: A CUDA graph of the whole forward for each size, recorded by hand.
    """

    def __init__(
        self,
        name: str = "compile_repeated_blocks",
        *,
        dynamic: bool | None = True,
        captured: bool = False,
    ) -> None:
        self.name, self._dynamic, self._captured = name, dynamic, captured

    def make(self, model: Any, store: Path) -> Step:
        self._raise_limits()
        if getattr(model, "_repeated_blocks", None):
            model.compile_repeated_blocks(dynamic=self._dynamic)
        else:
            for module in model.modules():
                if type(module).__name__.endswith("TransformerBlock"):
                    module.compile(dynamic=self._dynamic)
        return _RecordedForward(model) if self._captured else model


class _RecordedForward:
    """Replays one CUDA graph for each set of inputs, which it reads where they are."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inputs: dict[str, Any] | None = None

    def __call__(self, **inputs: Any) -> Any:
        if self._inputs is None or any(inputs[k] is not v for k, v in self._inputs.items()):
            self._inputs, self._graph = None, None
            for _ in range(3):
                self._model(**inputs)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = self._model(**inputs)
            self._inputs = inputs
        assert self._graph is not None
        self._graph.replay()
        return self._output


class StableFast(Contender):
    """stable-fast: traced, its own kernels, a CUDA graph for each size."""

    name = "stable-fast"
    static = True

    def missing(self) -> str:
        return _cannot_import("sfast.compilers.diffusion_pipeline_compiler")

    def make(self, model: Any, store: Path) -> Step:
        from sfast.compilers.diffusion_pipeline_compiler import CompilationConfig, compile_unet

        config = CompilationConfig.Default()
        config.enable_xformers = not _cannot_import("xformers")
        config.enable_triton = True
        config.enable_cuda_graph = True
        return compile_unet(model, config)


class TorchTensorRT(_Dynamo):
    """TensorRT as a backend of `torch.compile`, one size at a time as in its documentation."""

    name = "torch-tensorrt"
    static = True

    def missing(self) -> str:
        return _cannot_import("torch_tensorrt")

    def make(self, model: Any, store: Path) -> Step:
        import torch_tensorrt  # noqa: F401  (registers the backend)

        self._raise_limits()
        precisions = {torch.float32, next(model.parameters()).dtype}
        options: dict[str, Any] = {"truncate_double": True, "enabled_precisions": precisions}
        return torch.compile(
            model,
            backend="torch_tensorrt",
            dynamic=False,
            options=options,
        )


def figures_of(session: Session, ready_s: float) -> dict[str, Any]:
    """Return what a session built, loaded and recorded.

    Args:
        session: Of a contender.
        ready_s: Seconds until all its graphs were ready.
    """
    return {
        "ready_s": ready_s,
        "kinds": len(session.kinds),
        "built": session.count("built"),
        "loaded": session.count("loaded"),
        "captures": session.cuda_graphs.made,
        "dropped": list(session.cuda_graphs.dropped),
        "states": sorted({kind.state.value for kind in session.kinds}),
        "fallbacks": [vars(f) for f in session.fallbacks()],
    }


def unet_contenders(*, channels_last: bool = True) -> list[Contender]:
    """Return all contenders for a UNet, in the order of measurement.

    Args:
        channels_last: Ours convert weights to NHWC.
    """
    return [
        *_ours(channels_last=channels_last),
        *_tuned(channels_last=channels_last),
        RepeatedBlocks(),
        *_whole_model(),
        StableFast(),
        TorchTensorRT(),
    ]


def transformer_contenders() -> list[Contender]:
    """Return all contenders for a transformer, in the order of measurement."""
    return [
        *_ours(),
        Ours("ours-int8", build="wait", precision="int8"),
        *_tuned(),
        RepeatedBlocks("compile_repeated_blocks as shown", dynamic=None),
        RepeatedBlocks(),
        RepeatedBlocks("compile_repeated_blocks captured", captured=True),
        *_whole_model(),
    ]


def _ours(**layout: Any) -> list[Contender]:
    return [
        Eager(),
        Ours("ours-captured-eager", build="never", **layout),
        Ours("ours-graphs", build="wait", captures=False, **layout),
        Ours("ours-exact", build="wait", **layout),
        Ours("ours-fp8", build="wait", precision="fp8", **layout),
        Plain("plain", **layout),
        Plain("plain-fp8", precision="fp8", **layout),
    ]


def _tuned(**layout: Any) -> list[Contender]:
    return [
        Ours("ours-tuned", tuned=True, build="wait", **layout),
        Ours("ours-tuned-fp8", tuned=True, build="wait", precision="fp8", **layout),
    ]


def _whole_model() -> list[Contender]:
    return [
        Compiled("torch.compile dynamic", dynamic=True),
        Compiled("torch.compile"),
        Compiled("torch.compile reduce-overhead", mode="reduce-overhead"),
        Compiled("torch.compile max-autotune", mode="max-autotune"),
    ]


def choose(names: str, known: list[Contender]) -> list[Contender]:
    """Return the contenders of a comma-separated list of names and sets.

    The sets are "all", "ours" (with eager) and "peers".

    Args:
        names: The list.
        known: All contenders of the benchmark.

    Raises:
        SystemExit: A name is unknown.
    """
    wanted: set[str] = set()
    for name in (part.strip() for part in names.split(",")):
        of_set = {
            "all": known,
            "ours": [c for c in known if not c.is_peer],
            "peers": [c for c in known if c.is_peer],
        }.get(name, [c for c in known if c.name == name])
        if not of_set:
            raise SystemExit(
                f"There is no contender {name!r}. Known: all, ours, peers, "
                + ", ".join(c.name for c in known)
            )
        wanted |= {c.name for c in of_set}
    return [c for c in known if c.name in wanted]


def _is_transformer(model: Any) -> bool:
    return not hasattr(model.config, "cross_attention_dim")


def _cannot_import(module: str) -> str:
    import importlib

    try:
        importlib.import_module(module)
    except Exception as exc:  # a package for another torch may raise anything
        return f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"
    return ""
