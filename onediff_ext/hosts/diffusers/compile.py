"""`compile_pipe` and `undo_compile`: compiled graphs for the components of a diffusers pipeline."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from torch import nn

from onediff_ext.core.components import ComponentId
from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions
from onediff_ext.core.options import CompileOptions, parse_ignores
from onediff_ext.core.words import typed
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.torch_compile import unwrapped
from onediff_ext.hosts.diffusers.blocks import DIFFUSERS_FAMILIES
from onediff_ext.hosts.diffusers.chosen_deepcache import ChosenDeepCache
from onediff_ext.hosts.diffusers.deepcache import (
    check_deepcache,
    follow_unet,
    lifted,
    lifted_from,
)
from onediff_ext.hosts.diffusers.guidance_steps import check_guidance_steps, guidance_steps_for
from onediff_ext.hosts.diffusers.lora.exact_fusing import ExactFusing
from onediff_ext.hosts.diffusers.lora.peft_layers import PeftLoraRule
from onediff_ext.hosts.diffusers.offloading import offloaded_models
from onediff_ext.hosts.diffusers.pipeline_calls import (
    leave_calls,
    sampling_steps,
    watch_calls,
)
from onediff_ext.hosts.diffusers.pipeline_kinds import PipelineKinds
from onediff_ext.hosts.diffusers.pipeline_models import compiled_by_user, find_models
from onediff_ext.hosts.diffusers.step_cache import (
    ChosenStepCache,
    check_step_cache,
    lifted_step_cache,
    reset_step_cache,
    use_for_steps,
)
from onediff_ext.hosts.pinned_memory import PINNED_MEMORY
from onediff_ext.hosts.pinned_moves import PinnedMoves, use_pinned_memory
from onediff_ext.session.cfg_parallel import CfgParallel
from onediff_ext.session.model_component import Component
from onediff_ext.session.session import Session

logger = logging.getLogger(__name__)

# Of a compiled pipeline or module: its state.
COMPILED_ATTRIBUTE = "_onediff"
_PIPELINE_HINT = "Pass a pipeline of diffusers, or the `pipeline` of load_checkpoint(path)."
Pipe = TypeVar("Pipe")


class CompiledPipe:
    """The state of one compiled pipeline.

    Args:
        pipe: The pipeline.
        session: Has the kinds, graphs and counts.
        ignored: Components that stay eager.
        owns_session: The session serves only this pipeline and ends with it.

    Attributes:
        session, owns_session: As passed in.
        components: The models that run compiled.
        step_cache, deepcache: Those that `compile_pipe` was asked for, which end with the
            compilation; None for none.
        guidance_steps: In which steps calls of the pipeline have guidance.
    """

    def __init__(
        self, pipe: Any, session: Session, ignored: frozenset[str], *, owns_session: bool
    ) -> None:
        self.session, self.owns_session = session, owns_session
        self.components: list[Component] = []
        self._pipe, self._ignored = pipe, ignored
        self.step_cache: ChosenStepCache | None = None
        self.deepcache: ChosenDeepCache | None = None
        self.guidance_steps = ALL_STEPS
        self._patches = Patches()
        self._moves, self._move_patches = PinnedMoves(), Patches()
        self._offloaded: list[weakref.ref[nn.Module]] = []
        self._kinds: PipelineKinds | None = None

    def install(self) -> None:
        """Make the components run through graphs."""
        pipe = self._pipe
        if hasattr(pipe, "fuse_lora"):
            exact = ExactFusing(pipe)
            self._patches.set(pipe, "fuse_lora", exact.fuse_lora)
            self._patches.set(pipe, "unfuse_lora", exact.unfuse_lora)
        self._patches.set(pipe, COMPILED_ATTRIBUTE, self)
        watch_calls(pipe, _picture_of_call)
        models = find_models(pipe, self._ignored)
        self._serve(models)
        if self.owns_session:
            self._kinds = PipelineKinds(self.session, models)

    @contextmanager
    def picture(self, steps: int | None = None) -> Iterator[None]:
        """Draw one picture within the ``with`` block; see `one_picture`.

        Args:
            steps: Sampling steps that it will have, or None where that is unknown.
        """
        self.refresh()
        if steps is not None:
            use_for_steps(self._pipe, steps)
        self._speed_up_moves()
        try:
            with self.session.picture(), self._compiled_by_user():
                yield
        except BaseException:
            reset_step_cache(self._pipe)
            raise
        finally:
            PINNED_MEMORY.settle()
        if self._kinds is not None:
            self._kinds.record()

    @contextmanager
    def pipeline_call(self, steps: int | None) -> Iterator[None]:
        """Draw the picture of one call of the pipeline within the ``with`` block.

        Args:
            steps: As for `picture`.
        """
        with self.picture(steps), guidance_steps_for(self._pipe, self.guidance_steps) as guided:
            yield
            if guided is not None and guided.reason:
                self.session.fell_back("guidance steps", guided.reason)
            if guided is not None and guided.gate is not None and guided.gate.reason:
                self.session.fell_back("frozen cross-attention", guided.gate.reason)

    @contextmanager
    def _compiled_by_user(self) -> Iterator[None]:
        """Note of a picture which models run a user's `torch.compile` in place of their graphs."""
        for component in self.components:
            component.show_class()
        theirs = compiled_by_user(self._pipe)
        noted = [c for c in self.components if c.model in theirs and self.session.drew(c)]
        for component in noted:
            inside = set(component.model.modules())
            component.foreign_blocks.before_picture(component.runners, inside)
        yield
        for component in noted:
            component.foreign_blocks.after_first_forward(component.runners, replayed=False)

    def _speed_up_moves(self) -> None:
        """Have the models moved through pinned memory that are offloaded now, and no others."""
        models = offloaded_models(self._pipe)
        if [model() for model in self._offloaded] != models:
            self._move_patches.undo()
            self._move_patches = Patches()  # the last ones keep their models alive
            self._offloaded = list(map(weakref.ref, models))
        use_pinned_memory(self._moves, self._move_patches, models)

    def refresh(self) -> None:
        """Install on models that replaced others in the pipeline, and remove from the old ones."""
        follow_unet(self._pipe)
        models = find_models(self._pipe, self._ignored)
        served = [(c.identity, id(c.model)) for c in self.components]
        kept = {(identity, id(model)) for identity, model in models}
        if served != [(identity, id(model)) for identity, model in models]:
            gone = [c for c in self.components if (c.identity, id(c.model)) not in kept]
            with lifted(self._pipe), lifted_step_cache(self._pipe, [c.model for c in gone]):
                for component in gone:
                    with lifted_from(component.model):
                        component.remove()
                    self.components.remove(component)
                self._serve(models)
        if self.step_cache is not None:
            self.step_cache.follow(self._pipe)

    def remove(self) -> None:
        """Restore modules and weights, and stop builds for them."""
        if self.step_cache is not None:
            self.step_cache.remove()
        if self.deepcache is not None:
            self.deepcache.remove(self._pipe)
        if self.owns_session:
            self.session.close()
        leave_calls(self._pipe)
        with lifted(self._pipe), lifted_step_cache(self._pipe):
            for component in self.components:
                component.remove()
        self._move_patches.undo()
        self._patches.undo()
        PINNED_MEMORY.give_back()

    def _serve(self, models: list[tuple[ComponentId, nn.Module]]) -> None:
        served = {(c.identity, id(c.model)): c for c in self.components}
        self.components = []
        for identity, model in models:
            component = served.get((identity, id(model)))
            if component is None:
                component = Component(identity, model, self.session, channels_last=True)
                component.install()
                if identity.role.is_denoiser and self.session.options.cfg_parallel != "off":
                    parallel = CfgParallel(component, self.session.options.cfg_parallel)
                    component.cfg_parallel = parallel
            self.components.append(component)


def parse_options(
    options: CompileOptions | Mapping[str, Any] | None, backend: str | None
) -> CompileOptions:
    """Read options, and a backend that comes before theirs.

    Raises:
        OptionError: An option is unknown.
    """
    chosen = CompileOptions.parse(options)
    if backend is None:
        return chosen
    return CompileOptions.parse({**vars(chosen), "backend": backend})


def new_session(options: CompileOptions | Mapping[str, Any] | None = None) -> Session:
    """Create a session for diffusers models.

    One session may serve several pipelines, which then share graphs (never weights).
    """
    return Session(CompileOptions.parse(options), DIFFUSERS_FAMILIES, (PeftLoraRule(),))


def compile_pipe(
    pipe: Pipe,
    *,
    ignores: object = (),
    options: CompileOptions | Mapping[str, Any] | None = None,
    backend: str | None = None,
    fuse_qkv_projections: bool = False,  # noqa: ARG001
    deepcache: object = None,
    guidance_steps: object = None,
    session: Session | None = None,
) -> Pipe:
    """Run a pipeline's UNet or transformer, VAE and ControlNets through graphs, at any size.

    Each call of the pipeline draws one picture; graphs change between pictures only. Missing
    graphs are built in the background while pictures are drawn eager (option ``build``), and stored
    on disk. The rest of the pipeline does not change, and `undo_compile` restores
    everything. A model that replaces another one (``pipe.unet = other``) is compiled at the next
    picture, and the old model is restored. A copy of a compiled pipeline, or of one of its
    models, is not compiled. Pipelines may share models and be undone in any order; the pipeline
    that was compiled last serves the shared models.

    Args:
        pipe: Any diffusers pipeline with a ``unet``, ``transformer``, ``vae`` or ``controlnet``.
        ignores: Components that stay eager: ``"unet"``, ``"transformer"``, ``"vae"``,
            ``"vae_encoder"``, ``"vae_decoder"``, ``"controlnet"``.
        options: `CompileOptions`, or a mapping of its fields.
        backend: Shorthand for the option of this name.
        fuse_qkv_projections: Accepted as in OneDiff, and changes nothing. Fused projections are
            copies, in which a LoRA that is loaded later does not show. To have them all the same,
            call ``pipe.fuse_qkv_projections()``.
        deepcache: Reuse deep features of the UNet, as `enable_deepcache` does: 3, "medium", or
            `DeepCacheOptions`. Faster, but pictures differ. It ends with the compilation. None
            leaves DeepCache as it is without that of an earlier compilation.
        guidance_steps: Compute classifier-free guidance in some steps only, such as
            ``"interval:0-0.6"``, ``"adaptive:0.991"`` or ``"gate:0.4"``; see `GuidanceOptions`.
            Faster, but pictures differ. It holds for calls of this pipeline, and ends with the
            compilation.
        session: Share the graphs of this session, which has options of its own; the caller closes
            it. Without one, the pipeline gets its own session, which builds until `undo_compile`.

    Returns:
        The same pipeline.

    Raises:
        OptionError: An option is unknown or differs from the session's, an argument cannot be used
            or has another type, or the pipeline has nothing to compile. The pipeline stays as it
            was, compiled or not.
    """
    owns_session, chosen = session is None, chosen_options(options, backend, session)
    ignored = parse_ignores(ignores)
    _check_pipeline(pipe, ignored)
    step_cache = check_step_cache(pipe, chosen.step_cache)
    if deepcache is not None:
        check_deepcache(pipe, deepcache)
    guided = _check_guidance_steps(pipe, guidance_steps, chosen)
    session = session or new_session(chosen)
    undo_compile(pipe)
    compiled = CompiledPipe(pipe, session, ignored, owns_session=owns_session)
    with lifted(pipe), lifted_step_cache(pipe):
        compiled.install()
    if step_cache.is_on:
        compiled.step_cache = ChosenStepCache(step_cache)
        compiled.step_cache.install(pipe)
    if deepcache is not None:
        compiled.deepcache = ChosenDeepCache(pipe, deepcache)
    compiled.guidance_steps = guided
    return pipe


def _check_guidance_steps(pipe: object, value: object, options: CompileOptions) -> GuidanceOptions:
    """Raise OptionError for guidance steps that cannot be used, or not on two devices."""
    chosen = check_guidance_steps(pipe, value)
    if chosen.is_on and options.cfg_parallel != "off":
        raise OptionError(
            "Guidance steps and cfg_parallel cannot be used together.", "Leave one of them off."
        )
    return chosen


def _check_pipeline(pipe: object, ignored: frozenset[str]) -> None:
    """Raise OptionError for what cannot be compiled; the hint names what can."""
    if isinstance(pipe, type) or not hasattr(pipe, "__dict__"):
        raise OptionError(f"{typed(pipe)} is no pipeline.", _PIPELINE_HINT)
    if find_models(pipe, ignored):
        return
    hint = "A unet, transformer, vae or controlnet is needed that `ignores` does not name."
    if isinstance(pipe, nn.Module):
        hint = "Call compile_module for a single model."
    elif find_models(getattr(pipe, "pipeline", None), ignored):
        hint = "Pass its attribute `pipeline`."  # of `load_checkpoint`
    raise OptionError(f"{type(pipe).__name__} has no component to compile.", hint)


def chosen_options(
    options: CompileOptions | Mapping[str, Any] | None,
    backend: str | None,
    session: Session | None,
) -> CompileOptions:
    """Return the options of a call: the session's, if there is one.

    Raises:
        OptionError: An option is unknown, or differs from the session's, or it is no session.
    """
    chosen = parse_options(options, backend)
    if session is None:
        return chosen
    if not isinstance(session, Session):
        raise OptionError(f"{typed(session)} is no session.", "Pass one of new_session().")
    if (options is not None or backend is not None) and chosen != session.options:
        raise OptionError(
            "The session has other options.", "Leave them out, or give them to the session."
        )
    return session.options


def undo_compile(pipe: Pipe) -> Pipe:
    """Restore a pipeline or module as it was before `compile_pipe` or `compile_module`.

    Does nothing if it is not compiled.

    Raises:
        OptionError: It is neither a pipeline nor a module.
    """
    if isinstance(pipe, type) or not hasattr(pipe, "__dict__"):
        raise OptionError(f"{typed(pipe)} is neither a pipeline nor a module.", _PIPELINE_HINT)
    state: Any = compiled_state(pipe) or compiled_state(unwrapped(pipe))
    if state is not None:
        state.remove()
    return pipe


@contextmanager
def compiled(pipe: Pipe, **kwargs: Any) -> Iterator[Pipe]:
    """Compile a pipeline within a ``with`` block; takes the arguments of `compile_pipe`."""
    compile_pipe(pipe, **kwargs)
    try:
        yield pipe
    finally:
        undo_compile(pipe)


def compiled_state(pipe: object) -> CompiledPipe | None:
    """Return the state of a compiled pipeline, or None if it is not compiled."""
    found: CompiledPipe | None = getattr(pipe, "__dict__", {}).get(COMPILED_ATTRIBUTE)
    return found


def one_picture(pipe: object) -> AbstractContextManager[None]:
    """Draw one picture within this ``with`` block; its graphs do not change meanwhile.

    Each call of a compiled pipeline is one anyway. This joins several calls, and announces calls
    of its models.
    """
    state = compiled_state(pipe)
    return nullcontext() if state is None else state.picture()


def _picture_of_call(pipe: object, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """One picture that a call of the pipeline draws."""
    state = compiled_state(pipe)
    return nullcontext() if state is None else state.pipeline_call(sampling_steps(arguments))
