"""`compile_pipe` and what belongs to it: graphs under the components of a diffusers pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import CompileOptions, parse_ignores
from onediff_ext.engine.families.diffusers import DIFFUSERS_FAMILIES
from onediff_ext.engine.patch import Patches
from onediff_ext.hosts.diffusers.deepcache import enable_deepcache, lifted
from onediff_ext.hosts.diffusers.exact_fusing import ExactFusing
from onediff_ext.hosts.diffusers.lora_rule import PeftLoraRule
from onediff_ext.service.component import Component
from onediff_ext.service.session import Session

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_onediff"
Pipe = TypeVar("Pipe")


class CompiledPipe:
    """What `compile_pipe` has done to one pipeline.

    Attributes:
        session: Kinds, graphs and counts.
        components: The models that run compiled.
        owns_session: The session serves this pipeline only, and ends with it.
    """

    def __init__(
        self, session: Session, components: list[Component], *, owns_session: bool
    ) -> None:
        self.session, self.components = session, components
        self.owns_session = owns_session
        self._strides: list[tuple[nn.Parameter, torch.Size, tuple[int, ...]]] = []
        self._patches = Patches()
        self._unfuse: Callable[[], None] | None = None

    def install(self, pipe: Any) -> None:
        """Put graphs under the components."""
        if hasattr(pipe, "fuse_lora"):
            exact = ExactFusing(pipe)
            self._patches.set(pipe, "fuse_lora", exact.fuse_lora)
            self._patches.set(pipe, "unfuse_lora", exact.unfuse_lora)
        for component in self.components:
            if self.session.options.channels_last:
                self._use_channels_last(component.model)
            component.install()

    def fuse_projections(self, pipe: Any) -> None:
        """Join query, key and value projections by diffusers' own means, until `remove`."""
        if hasattr(pipe, "fuse_qkv_projections"):
            pipe.fuse_qkv_projections()
            self._unfuse = pipe.unfuse_qkv_projections

    def remove(self) -> None:
        """Leave modules and weights as they were, and build no more for them."""
        if self.owns_session:
            self.session.close()
        for component in self.components:
            component.remove()
        self._patches.undo()
        for parameter, shape, stride in self._strides:
            if parameter.shape == shape and parameter.stride() != stride:
                weight = parameter.data
                parameter.data = weight.new_empty_strided(shape, stride).copy_(weight)
        self._strides = []
        if self._unfuse is not None:
            self._unfuse()
            self._unfuse = None

    def _use_channels_last(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.ndim == 4 and not parameter.is_contiguous(
                memory_format=torch.channels_last
            ):
                self._strides.append((parameter, parameter.shape, parameter.stride()))
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


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
    it back.

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
    components = [
        Component(name, model, session) for name, model in find_models(pipe, parse_ignores(ignores))
    ]
    if not components:
        raise OptionError(
            f"{type(pipe).__name__} has no component to compile.",
            "A unet, vae or controlnet is needed that `ignores` does not name.",
        )
    compiled = CompiledPipe(session, components, owns_session=owns_session)
    with lifted(pipe):
        if fuse_qkv_projections:
            compiled.fuse_projections(pipe)
        compiled.install(pipe)
    vars(pipe)[_ATTRIBUTE] = compiled
    return pipe if deepcache is None else enable_deepcache(pipe, deepcache)


def undo_compile(pipe: Pipe) -> Pipe:
    """Leave the pipeline as it was before `compile_pipe`; does nothing if it is not compiled."""
    compiled = vars(pipe).pop(_ATTRIBUTE, None)
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
    return nullcontext() if state is None else state.session.picture()


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
