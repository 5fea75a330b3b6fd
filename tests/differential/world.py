"""A compiled pipeline, its twin, what is drawn with them, and how the pictures are compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.cuda_graphs.cache import CudaGraphCache
from onediff_ext.engine.cuda_graphs.recorder import Recorder
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session, undo_compile
from onediff_ext.session.session import Session
from tests.differential.mismatches import Mismatch, device_failure, difference
from tests.differential.picture import Picture
from tests.differential.rounding import TOLERANCES, Excused, SameNoise, allowed, in_float64
from tests.support import models
from tests.support.frozen_recorder import FrozenRecorder
from tests.support.transformer_models import MODELS

SIZES = ((64, 64), (64, 96), (96, 64), (72, 88), (104, 56))
TRANSFORMER_SIZES = ((64, 64), (64, 96), (96, 64), (80, 112), (112, 48))
UNETS: dict[str, Callable[[int], Any]] = {
    "sd15": lambda seed: models.sd15(seed, widths=(32, 64), attention=(True, False)),
    "sdxl": lambda seed: models.sdxl(
        seed, widths=(32, 64), attention=(False, True), heads=(1, 2), depths=(1, 2)
    ),
}
TRANSFORMERS = {name: MODELS[name] for name in ("sd3", "flux", "qwen_image", "z_image")}
# Drawn only if asked for. Their merged weights take more than 10 MiB: memory of their own that goes
# back to the GPU when it is freed, so that compute-sanitizer sees who still reads it.
WIDE_MODELS: dict[str, Callable[[int], Any]] = {
    "sd15-wide": lambda seed: models.sd15(seed, widths=(896,), attention=(True,)),
}


class World:
    """Everything that a sequence of operations acts on.

    Args:
        device: Where pictures are drawn.
        store: A folder for graphs.
        random: Decides the model and its weights.
        compiled: False leaves both pipelines eager, to test the operations themselves.
        model: One of `UNETS`, `TRANSFORMERS` or `WIDE_MODELS`; None for a random one of the first
            two.
        dtype: Of the models at first; None for the device's usual one.

    Attributes:
        pipe, twin: The pipelines.
        on: The features that are on, with what takes them back.
        picture: The arguments of the next picture.
        session: Of the compiled pipeline; None while it is undone.
        compiles: Whether one of them is compiled at all.
        hold: How many kinds a build may make; None for all of them.
        excused: Errors that passed as rounding.
        both_raised: Comparisons in which both raised, and no picture was compared.
        replays: How often CUDA graphs were replayed.
        has_replayed: Whether one was for the last picture.
    """

    def __init__(
        self,
        device: str,
        store: Path,
        random: Random,
        *,
        compiled: bool = True,
        model: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device, self.store, self.compiles = torch.device(device), store, compiled
        self.dtype = dtype or (torch.float16 if self.on_gpu else torch.float32)
        # As many sequences with UNets as with transformers.
        kinds = random.choice((sorted(UNETS), sorted(TRANSFORMERS)))
        self.model = random.choice(kinds) if model is None else model
        self.is_unet = self.model not in TRANSFORMERS
        self.part = "unet" if self.is_unet else "transformer"
        makers = {name: each.make for name, each in TRANSFORMERS.items()}
        self._make = {**UNETS, **WIDE_MODELS, **makers}[self.model]
        self.seed = random.randrange(1000)
        self.pipe, self.twin = self.make(self.seed), self.make(self.seed)
        self.on: dict[str, Callable[[], None]] = {}
        self.adapters: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.hold: int | None = None
        self.excused: list[Excused] = []
        self.both_raised = 0
        self.limit = 6
        self.session: Session | None = None
        self.sessions: list[Session] = []
        self.recorders: list[Recorder] = []
        self.others: list[Any] = []  # more pipelines that hold parts of ours, and ballast
        self.most_images: int | None = None  # for which ours has memory
        self.replaying = False
        self.replays = 0
        self.has_replayed = False
        self.gains: list[list[float]] = []  # of `own_processor`
        self.counters: list[list[int]] = []  # what features count, a number in each
        self.ip_images: list[int] = [0]  # the seed of what an IP-Adapter looks at
        self.noise_dtype: torch.dtype | None = None  # of noise, while it is not `dtype`
        self.picture = Picture()
        self.new_prompt(random.randrange(1000))
        for model in self.each_denoiser() if random.random() < 0.5 else ():
            model.requires_grad_(True)  # as `from_pretrained` leaves them
        self.compile()

    def make(self, seed: int) -> Any:
        """One more pipeline of this model."""
        pipe = self._make(seed)
        if pipe.vae is not None:
            pipe.vae.to(self.device)
        return pipe.to(self.device, self.dtype)

    @property
    def both(self) -> tuple[Any, Any]:
        """The compiled pipeline and its twin."""
        return self.pipe, self.twin

    def denoiser(self, pipe: Any) -> Any:
        """A pipeline's UNet or transformer."""
        return getattr(pipe, self.part)

    @property
    def twin_denoiser(self) -> Any:
        """The eager one."""
        return self.denoiser(self.twin)

    def each_denoiser(self) -> Iterator[Any]:
        """Those of both."""
        for pipe in self.both:
            yield self.denoiser(pipe)

    def has(self, *classes: str) -> bool:
        """Whether the denoiser has modules of these classes, by their bare names."""
        return any(type(module).__name__ in classes for module in self.twin_denoiser.modules())

    def compile(self) -> None:
        """Compile our pipeline with a session of its own."""
        if not self.compiles:
            return
        session = session_for(self.device, self.store, self.options)
        if not self.on_gpu:
            recorder = FrozenRecorder()
            session.cuda_graphs = CudaGraphCache(recorder, limit=self.limit)
            self.recorders.append(recorder)
        self.session = session
        self.sessions.append(session)
        compile_pipe(self.pipe, session=session, ignores=["vae"])

    @property
    def prompt_tensors(self) -> list[torch.Tensor]:
        """The tensors of the prompt, without masks."""
        leaves = tree_leaves(self.picture.prompts)
        return [leaf for leaf in leaves if leaf.is_floating_point()]

    @property
    def on_gpu(self) -> bool:
        """Whether real CUDA graphs are made."""
        return self.device.type == "cuda"

    @property
    def is_plain(self) -> bool:
        """Whether no feature is on, and no adapter loaded."""
        return not self.on and not self.adapters

    @property
    def no_adapters(self) -> bool:
        """Whether something is on that peft's adapters cannot be put under."""
        mine = {"ip_adapter", "layer_wrapped", "layer_replaced", "qkv_fused", "offloaded"}
        return bool((mine | {"deepcache"}) & self.on.keys())

    @property
    def processors_are_free(self) -> bool:
        """Whether no feature has set attention processors: each puts back those that it found."""
        mine = {"own_processor", "stateful_processor", "plain_processor", "sliced", "ip_adapter"}
        return not (mine | {"qkv_fused", "images_see_each_other"}) & self.on.keys()

    def new_kinds(self) -> None:
        """Have every kind of the session without its graph, as before it was built."""
        for kind in self.session.kinds if self.session is not None else ():
            if kind.graph is not None:
                kind.miss("the test wants it")

    def undo(self) -> None:
        """Leave our pipeline eager."""
        undo_compile(self.pipe)
        if self.session is not None:
            self.session.close()
        self.session = None

    def all_off(self) -> None:
        """Switch off every feature, the last one first."""
        while self.on:
            self.on.popitem()[1]()

    def close(self) -> None:
        """Leave nothing behind in torch and diffusers."""
        self.all_off()
        self.undo()
        for session in self.sessions:
            session.close()

    def new_prompt(self, seed: int) -> None:
        """Other prompt embeddings."""
        if not self.is_unet:
            made = TRANSFORMERS[self.model].embeddings(self.picture.tokens, 1, seed)
            self.picture.prompts = cast(made, self.dtype, self.device)
            return
        generator = torch.Generator().manual_seed(seed)
        width, tokens = self.twin.unet.config.cross_attention_dim, self.picture.tokens

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        prompts = {
            "prompt_embeds": noise(1, tokens, width),
            "negative_prompt_embeds": noise(1, tokens, width),
        }
        if self.model == "sdxl":
            prompts["pooled_prompt_embeds"] = noise(1, models.TEXT_2_WIDTH)
            prompts["negative_pooled_prompt_embeds"] = noise(1, models.TEXT_2_WIDTH)
        self.picture.prompts = prompts

    @property
    def counts_calls(self) -> bool:
        """Whether a feature is on whose result depends on the calls before, so that both pipelines
        must run equally often."""
        return bool({"stateful_processor", "forward_that_counts"} & self.on.keys())

    @property
    def rounded_to(self) -> torch.dtype:
        """The dtype that the picture's operators compute in."""
        return torch.bfloat16 if self.picture.autocast else self.dtype

    def compare(self) -> Mismatch | None:
        """Draw with both; returns what differs."""
        freed, replays = self.freed, self.replays
        with self._short_of_memory():
            ours = self._outcome(self.pipe)
        self.has_replayed = self.replays > replays
        counted = [counter[0] for counter in self.counters]
        theirs = self._outcome(self.twin)
        if self.most_images is not None and isinstance(ours, torch.OutOfMemoryError):
            return None
        if isinstance(theirs, BaseException):
            if self.on_gpu and (reason := device_failure()):
                return Mismatch("device", 0.0, f"{reason}; ours: {ours!r}"[:400])
            self.both_raised += type(ours) is type(theirs)
        if self.freed > freed:
            return Mismatch("freed", 0.0, f"a replay touched {self.freed - freed} freed storages")
        found = difference(ours, theirs, TOLERANCES[self.device.type, self.rounded_to])
        if found is None or found.what != "picture" or "offloaded" in self.on:
            return found
        exact = self._exact(counted)
        if isinstance(exact, BaseException):
            return replace(found, text=f"{found.text}; in float64 the twin raises {exact!r}")
        own = float((theirs - exact).norm() / exact.norm())
        if found.error <= allowed(self.rounded_to, own):
            self.excused.append(Excused(found.error, own, self.rounded_to))
            return None
        return replace(found, text=f"{found.text}; the twin's own rounding is {own:.2g}")

    def _exact(self, counted: Sequence[int]) -> torch.Tensor | BaseException:
        """The twin's picture in float64, drawn while its features' counters are at these numbers;
        afterwards they are where they were."""
        dtype, prompts = self.dtype, self.picture.prompts
        after = [counter[0] for counter in self.counters]
        parts = [part for part in self.twin.components.values() if isinstance(part, nn.Module)]
        self._count_from(counted)
        self.dtype, self.noise_dtype = torch.float64, dtype
        self.picture.prompts = cast(prompts, torch.float64)
        try:
            with in_float64(parts):
                return self._outcome(self.twin)
        finally:
            self.dtype, self.picture.prompts, self.noise_dtype = dtype, prompts, None
            self._count_from(after)

    def _count_from(self, numbers: Sequence[int]) -> None:
        for counter, number in zip(self.counters, numbers, strict=True):
            counter[0] = number

    def settle(self, limit_s: float = 240.0) -> Mismatch | None:
        """Draw until no graph is being built any more, for so long at most."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            mismatch = self.compare()
            if mismatch is not None or self.session is None:
                return mismatch
            status = self.session.status()
            if not status.building and status.kinds_needed:
                break
            time.sleep(0.5)
        return self.compare()

    @property
    def freed(self) -> int:
        """How often a replay touched memory that was given back."""
        return sum(r.freed for r in self.recorders if isinstance(r, FrozenRecorder))

    def _outcome(self, pipe: Any) -> torch.Tensor | BaseException:
        try:
            return self._draw(pipe)
        except (Exception, KeyboardInterrupt) as exc:
            return exc

    def _draw(self, pipe: Any) -> torch.Tensor:
        from tests.differential.drawing import draw

        found: list[Any] = []

        def work() -> None:
            try:
                with self._modes(pipe):
                    found.append(draw(self, pipe).detach().clone().double().cpu())
            except (Exception, KeyboardInterrupt) as exc:
                found.append(exc)

        if self.picture.in_thread:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    @contextmanager
    def _short_of_memory(self) -> Iterator[None]:
        """Within it, an operator of each block raises for too many images: below all that Python
        sees, as an allocator does. A replay allocates nothing."""
        most = self.most_images
        if most is None:
            yield
            return

        def silu(x: torch.Tensor) -> torch.Tensor:
            if x.ndim == 4 and x.shape[0] > most and not self.replaying:
                raise torch.OutOfMemoryError("no room for so many images")
            return torch.ops.aten.silu.out(x, out=torch.empty_like(x))

        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("silu", silu, "CPU")
            yield
        finally:
            library._destroy()

    @contextmanager
    def _modes(self, pipe: Any) -> Iterator[None]:
        picture = self.picture
        with ExitStack() as stack:
            if self.session is not None and pipe is self.pipe and picture.as_picture:
                stack.enter_context(self.session.picture())
            stack.enter_context(torch.inference_mode() if picture.inference else torch.no_grad())
            if picture.autocast:
                stack.enter_context(torch.autocast(self.device.type, torch.bfloat16))
            if self.noise_dtype is not None:
                stack.enter_context(SameNoise(self.noise_dtype))
            if picture.mode is not None:
                stack.enter_context(picture.mode())
            if picture.in_thread and self.on_gpu:
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
            yield


def session_for(device: torch.device, store: Path, options: Mapping[str, Any]) -> Session:
    """A session as worlds compile with it."""
    on_gpu = device.type == "cuda"
    backend, build = ("inductor", "background") if on_gpu else ("eager", "wait")
    return new_session(
        CompileOptions.parse({"backend": backend, "build": build, "store": store, **options})
    )


def cast(prompts: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """Prompts in another dtype; masks stay what they are."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    return tree_map(one, prompts)
