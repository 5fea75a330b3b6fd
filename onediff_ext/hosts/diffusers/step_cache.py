"""diffusers' step caches (FirstBlockCache, MagCache, TaylorSeer) with compiled transformers.

The hooks sit around whole blocks. A block that a cache lets run goes through its graph. A CUDA
graph of the whole forward is impossible meanwhile: the cache decides in Python at each step.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from onediff_ext.core.errors import OptionError
from onediff_ext.core.step_cache_options import StepCacheOptions

logger = logging.getLogger(__name__)

Pipe = TypeVar("Pipe")

DEFAULT_STEPS = 28
_NAMES = ("transformer", "transformer_2")


@dataclass(eq=False)
class _Choice:
    """diffusers' config of a step cache, or None for none, and the options that it was made of."""

    config: Any
    options: StepCacheOptions | None = None  # None for the user's own


# Of transformers with a step cache of a compile option: the choice from before, then those of the
# pipelines, in the order in which they were compiled.
_choices: weakref.WeakKeyDictionary[nn.Module, list[_Choice]] = weakref.WeakKeyDictionary()


def enable_step_cache(pipe: Pipe, options: object, steps: int = DEFAULT_STEPS) -> Pipe:
    """Skip blocks whose result hardly changes between steps, until `disable_step_cache`.

    Pictures differ from those without it, and equal those of diffusers' own ``enable_cache``.

    Args:
        pipe: The pipeline, compiled or eager.
        options: What `StepCacheOptions.parse` takes, such as "first-block:0.08"; "off" disables.
        steps: Sampling steps of a picture; only MagCache needs them.

    Returns:
        The same pipeline.

    Raises:
        OptionError: diffusers has no such cache for this pipeline, or `steps` is no number of them.
    """
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(f"{steps!r} is no number of steps.", "Pass a whole number from 1.")
    chosen = check_step_cache(pipe, options)
    disable_step_cache(pipe)
    if chosen.is_on:
        for model in _models(pipe):
            model.enable_cache(_config(chosen, steps))
    return pipe


def check_step_cache(pipe: object, options: object) -> StepCacheOptions:
    """Read the options of a step cache that a pipeline is to have.

    Args:
        pipe: The pipeline; it is not changed.
        options: What `StepCacheOptions.parse` takes.

    Raises:
        OptionError: diffusers has no such cache for this pipeline.
    """
    chosen = StepCacheOptions.parse(options)
    if not chosen.is_on:
        return chosen
    models = _models(pipe)
    without = "Leave the step cache off."
    if not models:
        raise OptionError(
            f"{type(pipe).__name__} has no transformer, so no step cache.",
            "Use DeepCache for UNets.",
        )
    for model in models:
        name = type(model).__name__
        if not hasattr(model, "enable_cache"):
            raise OptionError(f"diffusers has no step cache for {name}.", without)
        if chosen.method == "mag-cache" and name != "FluxTransformer2DModel":
            raise OptionError(
                f"diffusers has no magnitudes of {name} for mag-cache.",
                "Use first-block or taylorseer-lite.",
            )
    call: Any = inspect.unwrap(type(pipe).__call__)
    if "cache_context" not in call.__code__.co_names:
        raise OptionError(f"diffusers' {type(pipe).__name__} runs without step caches.", without)
    return chosen


def disable_step_cache(pipe: Pipe) -> Pipe:
    """Remove the step cache of a pipeline's transformers; does nothing where there is none."""
    for model in _models(pipe):
        if getattr(model, "is_cache_enabled", False):
            model.disable_cache()
    return pipe


def reset_step_cache(pipe: object) -> None:
    """Let the next picture begin with an empty step cache.

    diffusers does so at the end of a pipeline's call, which an exception leaves out. The next
    picture would take what the last one kept, or fail if it has another size.

    Args:
        pipe: A pipeline whose call has failed.
    """
    for model in _models(pipe):
        if getattr(model, "is_cache_enabled", False):
            model._reset_stateful_cache()


def use_for_steps(pipe: object, steps: int) -> None:
    """Fit the step cache of a compile option to the number of steps of a picture.

    Only MagCache needs it: it has a magnitude for each step. The user's own config stays.

    Args:
        pipe: The pipeline that draws.
        steps: Sampling steps of the picture.
    """
    for model in _models(pipe):
        choice = _choices[model][-1] if model in _choices else None
        if choice is None or choice.options is None or choice.options.method != "mag-cache":
            continue
        is_in_use = getattr(model, "_cache_config", None) is choice.config
        if is_in_use and choice.config.num_inference_steps != steps:
            choice.config = _config(choice.options, steps)
            _use(model, choice.config)


class ChosenStepCache:
    """The step cache of a pipeline's compile option, on the transformers that the pipeline has.

    A transformer has one step cache at a time. Where pipelines share it, it is that of the pipeline
    that was compiled last; then that of the one before it; at last the user's own.

    Args:
        options: Which cache.
    """

    def __init__(self, options: StepCacheOptions) -> None:
        self._options = options
        self._ours: list[tuple[weakref.ref[nn.Module], _Choice]] = []

    def install(self, pipe: object) -> None:
        """Set it up on the transformers of a pipeline, and take it back from others.

        Args:
            pipe: The pipeline.

        Raises:
            OptionError: diffusers has no such cache for this pipeline.
        """
        models = _models(pipe)
        if [model() for model, _ in self._ours] == models:
            return
        check_step_cache(pipe, self._options)
        self._remove_from_others(models)
        served = [model() for model, _ in self._ours]
        for model in models:
            if model not in served:
                choice = _Choice(_config(self._options, DEFAULT_STEPS), self._options)
                _choices.setdefault(model, [_Choice(model._cache_config)]).append(choice)
                self._ours.append((weakref.ref(model), choice))
                _use(model, choice.config)

    def follow(self, pipe: object) -> None:
        """As `install`, for a pipeline that may have got other transformers, without an error."""
        try:
            self.install(pipe)
        except OptionError as exc:
            self.remove()
            logger.warning("The pipeline has other models now: %s", exc.message)

    def remove(self) -> None:
        """Leave every transformer with the step cache that it has without this one."""
        self._remove_from_others([])

    def _remove_from_others(self, models: Sequence[nn.Module]) -> None:
        for entry in list(self._ours):
            reference, choice = entry
            model: Any = reference()
            if model is not None and model in models:
                continue
            self._ours.remove(entry)
            if model is None:
                continue
            choices = _choices[model]
            was_last = choices[-1] is choice
            choices[:] = [each for each in choices if each is not choice]
            if was_last:
                _use(model, choices[-1].config)
            if len(choices) == 1:
                del _choices[model]


def _use(model: Any, config: Any) -> None:
    """Give a transformer a step cache in place of the one that it has; None for none."""
    if model.is_cache_enabled:
        model.disable_cache()
    if config is not None:
        model.enable_cache(config)


@contextmanager
def step_cache_for(pipe: Any, options: StepCacheOptions, steps: int) -> Iterator[None]:
    """Draw one batch with a step cache within this ``with`` block.

    Args:
        pipe: The pipeline.
        options: Which cache; where it is off, the pipeline's own setting stays.
        steps: Sampling steps that will run.

    Raises:
        OptionError: As `enable_step_cache`.
    """
    if not options.is_on:
        yield
        return
    with lifted_step_cache(pipe):
        enable_step_cache(pipe, options, steps)
        try:
            yield
        finally:
            disable_step_cache(pipe)


@contextmanager
def lifted_step_cache(pipe: Any, others: Sequence[Any] = ()) -> Iterator[None]:
    """A context without a pipeline's step cache, which is set up again at the end.

    A cache's hooks have to be outside of the runners of the blocks.

    Args:
        pipe: The pipeline.
        others: Models that were the pipeline's before.
    """
    lifted = [
        (model, model._cache_config)
        for model in [*_models(pipe), *others]
        if getattr(model, "is_cache_enabled", False)
    ]
    for model, _ in lifted:
        model.disable_cache()
    try:
        yield
    finally:
        for model, config in lifted:
            if not model.is_cache_enabled:
                model.enable_cache(config)


def _models(pipe: object) -> list[Any]:
    models = (getattr(pipe, name, None) for name in _NAMES)
    return [model for model in models if model is not None]


def _config(options: StepCacheOptions, steps: int) -> Any:
    import diffusers

    if options.method == "first-block":
        return diffusers.FirstBlockCacheConfig(threshold=options.amount)
    if options.method == "mag-cache":
        from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

        return diffusers.MagCacheConfig(
            threshold=options.amount, num_inference_steps=steps, mag_ratios=FLUX_MAG_RATIOS
        )
    return diffusers.TaylorSeerCacheConfig(
        cache_interval=int(options.amount), max_order=1, use_lite_mode=True
    )
