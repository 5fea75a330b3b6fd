"""`compile_pipe` and what belongs to it: graphs under the components of a diffusers pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn

from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import CompileOptions, parse_ignores
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.diffusers.blocks import DIFFUSERS_FAMILIES
from onediff_ext.hosts.diffusers.deepcache import enable_deepcache, lifted, lifted_from
from onediff_ext.hosts.diffusers.lora.exact_fusing import ExactFusing
from onediff_ext.hosts.diffusers.lora.peft_layers import PeftLoraRule
from onediff_ext.session.model_component import Component
from onediff_ext.session.session import Session

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_onediff"
Pipe = TypeVar("Pipe")


class CompiledPipe:
    """What `compile_pipe` has done to one pipeline.

    Args:
        pipe: The pipeline.
        session: Kinds, graphs and counts.
        ignored: Components to leave alone.
        owns_session: The session serves this pipeline only, and ends with it.

    Attributes:
        session, owns_session: As given.
        components: The models that run compiled.

    Raises:
        OptionError: There is nothing to compile.
    """

    def __init__(
        self, pipe: Any, session: Session, ignored: frozenset[str], *, owns_session: bool
    ) -> None:
        self.session, self.owns_session = session, owns_session
        self.components: list[Component] = []
        self._pipe, self._ignored = pipe, ignored
        self._patches = Patches()
        self._fused: list[Any] = []
        self._fuses = False
        if not find_models(pipe, ignored):
            raise OptionError(
                f"{type(pipe).__name__} has no component to compile.",
                "A unet, vae or controlnet is needed that `ignores` does not name.",
            )

    def install(self, *, fuse_projections: bool = False) -> None:
        """Put graphs under the components.

        Args:
            fuse_projections: Have diffusers join query, key and value projections first.
        """
        pipe, self._fuses = self._pipe, fuse_projections
        if hasattr(pipe, "fuse_lora"):
            exact = ExactFusing(pipe)
            self._patches.set(pipe, "fuse_lora", exact.fuse_lora)
            self._patches.set(pipe, "unfuse_lora", exact.unfuse_lora)
        if callable(getattr(pipe, "check_inputs", None)):
            # Each of diffusers' pipelines begins a picture with it.
            self._patches.set(pipe, "check_inputs", _BeginningPicture(pipe.check_inputs, self))
        self._patches.set(pipe, _ATTRIBUTE, self)
        self._serve(find_models(pipe, self._ignored))

    def refresh(self) -> None:
        """Serve the models that the pipeline has now: one may have been replaced."""
        models = find_models(self._pipe, self._ignored)
        if [(c.name, id(c.model)) for c in self.components] == [(n, id(m)) for n, m in models]:
            return
        with lifted(self._pipe):
            kept = {(name, id(model)) for name, model in models}
            for component in [c for c in self.components if (c.name, id(c.model)) not in kept]:
                with lifted_from(component.model):
                    component.remove()
                self.components.remove(component)
            used = {id(model) for model in self._models_to_fuse()}
            for model in [model for model in self._fused if id(model) not in used]:
                model.unfuse_qkv_projections()
                self._fused.remove(model)
            self._serve(models)

    def remove(self) -> None:
        """Leave modules and weights as they were, and build no more for them."""
        if self.owns_session:
            self.session.close()
        for component in self.components:
            component.remove()
        self._patches.undo()
        for model in self._fused:
            model.unfuse_qkv_projections()
        self._fused = []

    def _serve(self, models: list[tuple[str, nn.Module]]) -> None:
        if self._fuses:
            for model in self._models_to_fuse():
                # Another pipeline that shares it may have joined them, and takes that back.
                processors = map(type, model.attn_processors.values())
                if not any(cls.__name__.startswith("Fused") for cls in processors):
                    model.fuse_qkv_projections()
                    self._fused.append(model)
        served = {(component.name, id(component.model)): component for component in self.components}
        self.components = []
        for name, model in models:
            component = served.get((name, id(model)))
            if component is None:
                component = Component(name, model, self.session, channels_last=True)
                component.install()
            self.components.append(component)

    def _models_to_fuse(self) -> list[Any]:
        """Those whose projections diffusers' pipelines join."""
        if not hasattr(self._pipe, "fuse_qkv_projections"):
            return []
        models = (getattr(self._pipe, name, None) for name in ("unet", "vae"))
        return [model for model in models if hasattr(model, "fuse_qkv_projections")]


class _BeginningPicture:
    """The pipeline's method that each of its pictures begins with."""

    def __init__(self, method: Callable[..., Any], compiled: CompiledPipe) -> None:
        self._method, self._compiled = method, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._compiled.refresh()
        return self._method(*args, **kwargs)


def new_session(options: CompileOptions | Mapping[str, Any] | None = None) -> Session:
    """A session for diffusers models. One session may serve several pipes, which then share
    graphs (never weights)."""
    return Session(CompileOptions.parse(options), DIFFUSERS_FAMILIES, (PeftLoraRule(),))


def compile_pipe(
    pipe: Pipe,
    *,
    ignores: object = (),
    options: CompileOptions | Mapping[str, Any] | None = None,
    backend: str | None = None,
    fuse_qkv_projections: bool = False,
    deepcache: object = None,
    session: Session | None = None,
) -> Pipe:
    """Run a pipeline's UNet, VAE and ControlNets through compiled graphs, at any size.

    Missing graphs are built beside the pictures, which are drawn eager meanwhile (option
    ``build``), and kept on disk. Nothing else of the pipeline changes, and `undo_compile` takes
    it back. A model that replaces one of the pipeline's (``pipe.unet = other``) is compiled at
    the next picture, and the old one is left as it was. A copy of a compiled pipeline, or of one
    of its models, is not compiled. Pipelines may share models and be undone in any order; the
    one that was compiled last serves what they share.

    Args:
        pipe: Any diffusers pipeline with a ``unet``, ``vae`` or ``controlnet``.
        ignores: Components to leave alone: ``"unet"``, ``"vae"``, ``"vae_encoder"``,
            ``"vae_decoder"``, ``"controlnet"``.
        options: `CompileOptions`, or a mapping of its fields.
        backend: Shorthand for the option of this name.
        fuse_qkv_projections: Let diffusers join the projections of its attention first, where
            the pipeline can; taken back by `undo_compile`.
        deepcache: Reuse deep features of the UNet, as `enable_deepcache` does: 3, "medium", or
            `DeepCacheOptions`. Faster, but pictures differ; None leaves it as it is (off).
        session: Share the graphs of this session; the caller closes it. Without one, the pipeline
            gets its own, which builds until `undo_compile`.

    Returns:
        The same pipeline.

    Raises:
        OptionError: An option is unknown, or the pipeline has nothing to compile.
    """
    undo_compile(pipe)
    chosen = CompileOptions.parse(options)
    if backend is not None:
        chosen = CompileOptions.parse({**vars(chosen), "backend": backend})
    owns_session = session is None
    session = session or new_session(chosen)
    compiled = CompiledPipe(pipe, session, parse_ignores(ignores), owns_session=owns_session)
    with lifted(pipe):
        compiled.install(fuse_projections=fuse_qkv_projections)
    return pipe if deepcache is None else enable_deepcache(pipe, deepcache)


def undo_compile(pipe: Pipe) -> Pipe:
    """Leave the pipeline as it was before `compile_pipe`; does nothing if it is not compiled."""
    compiled = compiled_state(pipe)
    if compiled is not None:
        with lifted(pipe):
            compiled.remove()
    return pipe


@contextmanager
def compiled(pipe: Pipe, **kwargs: Any) -> Iterator[Pipe]:
    """`compile_pipe` for the length of a ``with`` block; takes the same arguments."""
    compile_pipe(pipe, **kwargs)
    try:
        yield pipe
    finally:
        undo_compile(pipe)


def compiled_state(pipe: object) -> CompiledPipe | None:
    """What `compile_pipe` has done to a pipeline, or None."""
    found: CompiledPipe | None = vars(pipe).get(_ATTRIBUTE)
    return found


def one_picture(pipe: object) -> AbstractContextManager[None]:
    """Within this ``with`` block one picture is drawn: graphs change before it or after it."""
    state = compiled_state(pipe)
    if state is None:
        return nullcontext()
    state.refresh()
    return state.session.picture()


def find_models(pipe: object, ignored: frozenset[str]) -> list[tuple[str, nn.Module]]:
    """The pipeline's models that can run compiled, by component name."""
    models: list[tuple[str, nn.Module]] = []
    unet = getattr(pipe, "unet", None)
    if unet is not None and "unet" not in ignored:
        models.append(("unet", unet))
    vae = getattr(pipe, "vae", None)
    for part in ("encoder", "decoder"):
        model = getattr(vae, part, None)
        if isinstance(model, nn.Module) and f"vae_{part}" not in ignored:
            models.append((f"vae_{part}", model))
    controlnet = getattr(pipe, "controlnet", None)
    if controlnet is not None and "controlnet" not in ignored:
        nets = getattr(controlnet, "nets", None) or [controlnet]
        models += [(f"controlnet{i or ''}", net) for i, net in enumerate(nets)]
    return models
