"""DeepCache for diffusers pipelines: where a picture begins, and what invalidates its features."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions, few_steps_reason
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.deepcache_forward import (
    DeepCache,
    deepcache_of,
    installed_deepcache,
)
from onediff_ext.engine.guidance.guided_forward import lifted_guidance
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.timesteps import are_of_one_tensor
from onediff_ext.engine.torch_compile import TORCH_COMPILES, compiled_modules
from onediff_ext.hosts.diffusers.deepcache_notes import Invalidating, NoteControl
from onediff_ext.hosts.diffusers.deepcache_timesteps import (
    evaluations_left,
    is_same_evaluation,
    is_same_picture,
    whole_schedule,
)
from onediff_ext.hosts.diffusers.deepcache_unet import DiffusersUNet, distilled_reason
from onediff_ext.hosts.diffusers.denoiser import denoiser_of

logger = logging.getLogger(__name__)

Pipe = TypeVar("Pipe")

# Methods of a UNet that change its weights, so that features are invalid afterwards.
_CHANGES = (
    *("load_lora_adapter", "add_adapter", "delete_adapters", "unload_lora"),
    *("set_adapter", "set_adapters", "enable_adapters", "disable_adapters"),
    *("enable_lora", "disable_lora", "fuse_lora", "unfuse_lora"),
    *("load_attn_procs", "set_attn_processor", "load_state_dict"),
    *("enable_freeu", "disable_freeu"),
)


def enable_deepcache(pipe: Pipe, options: object = True) -> Pipe:
    """Reuse deep features of a pipeline's UNet, until `disable_deepcache`.

    Works on any pipeline with a `UNet2DConditionModel` of SD 1.x, SD 2.x or SDXL: compiled or
    eager, with ControlNet, LoRA, image to image or inpainting. Pipelines that share the UNet share
    its DeepCache too; call this for each of them, so that their own schedulers and ControlNets
    count. Pictures differ from those without it.

    Args:
        pipe: The pipeline.
        options: `DeepCacheOptions`, or what its `parse` takes: 3, "medium", "3 depth=1".

    Returns:
        The same pipeline.

    Raises:
        OptionError: An option cannot be used, or the UNet has another class.
    """
    unet: Any = getattr(pipe, "unet", None)
    with lifted_guidance(unet):
        chosen = check_deepcache(pipe, options)
        _leave_other_unet(pipe)
        switch = switch_of(unet)
        if switch is not None and not switch.is_outermost:
            switch.remove()
            switch = None
        if switch is None:
            switch = Switch(unet)
            switch.install()
        switch.cache.begin_picture(chosen)
        switch.use(pipe)
    return pipe


def check_deepcache(pipe: object, options: object) -> DeepCacheOptions:
    """Read the options of DeepCache for a pipeline.

    Args:
        pipe: The pipeline; it is not changed.
        options: As for `enable_deepcache`.

    Raises:
        OptionError: An option cannot be used, or the UNet has another class.
    """
    chosen = DeepCacheOptions.parse(options)
    unet: Any = getattr(pipe, "unet", None)
    if type(unet).__name__ != "UNet2DConditionModel":
        raise OptionError(
            f"{type(pipe).__name__} has no UNet that DeepCache knows.",
            "It works with the pipelines of SD 1.x, SD 2.x and SDXL.",
        )
    switch = switch_of(unet)
    if switch is not None and switch.is_outermost:
        # It draws in plain calls where a block has become unknown since.
        switch.cache.adapter.check(chosen)
    else:
        DiffusersUNet(unet).check(chosen)
    return chosen


def disable_deepcache(pipe: Pipe) -> Pipe:
    """Leave a pipeline as it was before `enable_deepcache`; does nothing if it is not enabled."""
    unet: Any = getattr(pipe, "unet", None)
    with lifted_guidance(unet):
        _leave_other_unet(pipe)
        switch = switch_of(unet)
        if switch is not None:
            switch.remove()
    return pipe


def follow_unet(pipe: Any) -> None:
    """Put a pipeline's DeepCache on a UNet that has replaced another one in the pipeline.

    The old UNet is left without it, unless another pipeline with this UNet has it too.

    Args:
        pipe: The pipeline, with or without DeepCache.
    """
    left = _leave_other_unet(pipe)
    if left is None:
        return
    there = switch_of(getattr(pipe, "unet", None))
    if there is not None:  # with the options of the pipelines that have this UNet
        there.use(pipe)
        return
    try:
        enable_deepcache(pipe, left.cache.options)
    except OptionError as exc:
        logger.warning("DeepCache is off: the pipeline has another UNet. %s", exc.message)


def _leave_other_unet(pipe: object) -> Switch | None:
    """Let a pipeline leave the DeepCache of a UNet that it has no more, and return that one."""
    ending = getattr(pipe, "__dict__", {}).get("maybe_free_model_hooks")
    if not isinstance(ending, _EndingPicture):
        return None
    if ending.switch.cache.model is getattr(pipe, "unet", None):
        return None
    ending.switch.leave(pipe)
    return ending.switch


def deepcache_state(pipe: object) -> DeepCache | None:
    """The DeepCache of a pipeline's UNet, with counts and reasons; None if it has none."""
    unet = getattr(pipe, "unet", None)
    return installed_deepcache(unet) if isinstance(unet, nn.Module) else None


@contextmanager
def deepcache_for(pipe: Any, options: DeepCacheOptions) -> Iterator[None]:
    """Draw one batch with these options and release the memory afterwards.

    DeepCache stays installed and passes calls through, so CUDA graphs stay valid.

    Raises:
        OptionError: As `enable_deepcache`.
    """
    follow_unet(pipe)
    cache = deepcache_state(pipe)
    before = OFF if cache is None else cache.options
    if options.is_on:
        enable_deepcache(pipe, options)
        cache = deepcache_state(pipe)
    elif cache is not None:
        cache.begin_picture(OFF)
    try:
        yield
    finally:
        if cache is not None:
            cache.end_picture()
            cache.begin_picture(before)


@contextmanager
def lifted(pipe: object) -> Iterator[None]:
    """A context without a pipeline's DeepCache, which then wraps what is there at the end.

    DeepCache has to be the outermost wrapper: a CUDA graph must not contain its decisions. So have
    the forwards of pictures with guidance steps, which stand around it.
    """
    with lifted_from(denoiser_of(pipe)):
        yield


@contextmanager
def lifted_from(model: object) -> Iterator[None]:
    """`lifted` for one model."""
    with lifted_guidance(model):
        cache = deepcache_of(model) if isinstance(model, nn.Module) else None
        if cache is None:
            yield
            return
        cache.remove()
        try:
            yield
        finally:
            cache.install()


class Switch:
    """DeepCache around one UNet, and the hooks that keep its features valid.

    As DeepCache's clock it tells pictures and evaluations apart by the timestep that pipelines pass
    to the UNet, an element of the scheduler's tensor. A new tensor is a new picture, and another
    element is another evaluation, so nothing is read from a GPU. Other timesteps are compared by
    value, which falls within a picture.
    """

    def __init__(self, unet: Any) -> None:
        self._unet = unet
        self.cache = DeepCache(unet, DiffusersUNet(unet), self)
        self._last: Any = None  # kept, so that no other tensor gets its memory
        self._patches = Patches()
        self._latest: _FollowedPipe | None = None
        self._followed: weakref.WeakSet[_FollowedPipe] = weakref.WeakSet()  # each pipeline has its

    def __call__(self, cache: DeepCache, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        timestep = args[1] if len(args) > 1 else kwargs.get("timestep")
        last, self._last = self._last, timestep
        if last is None or not is_same_picture(last, timestep):
            for each in list(self._followed):
                each.follow_controlnets()
            cache.begin_picture(
                evaluations=evaluations_left(timestep),
                refusal_reason=self._refusal_reason(timestep),
            )
        elif is_same_evaluation(last, timestep):
            return
        cache.begin_evaluation()

    @property
    def is_outermost(self) -> bool:
        """Whether no other extension has wrapped it or has taken it away."""
        return deepcache_of(self.cache.model) is self.cache

    def install(self) -> None:
        self.cache.install()
        for name in _CHANGES:
            method = getattr(self._unet, name, None)
            if method is not None:
                self._patches.set(self._unet, name, Invalidating(method, self.cache))

    def use(self, pipe: Any) -> None:
        """Follow a pipeline's scheduler, its ControlNets and the end of its pictures."""
        self._forget(pipe)
        self._last = None
        self._latest = _FollowedPipe(pipe, self)
        self._followed.add(self._latest)

    def follower_of(self, pipe: object) -> object:
        """What follows a pipeline, another object after each `use`; None if it is not followed."""
        return next((each for each in list(self._followed) if each.pipe is pipe), None)

    def leave(self, pipe: object) -> None:
        """Follow a pipeline no more, and end after the last one."""
        self._forget(pipe)
        if self._latest is not None and self._latest.pipe is pipe:
            self._latest = None
        if not self._followed:
            self.remove()

    def _forget(self, pipe: object) -> None:
        for each in list(self._followed):
            if each.pipe is pipe:
                each.leave()
                self._followed.discard(each)

    def end_picture(self) -> None:
        self._last = None
        self.cache.end_picture()

    def remove(self) -> None:
        for each in list(self._followed):
            each.leave()
        self._followed.clear()
        self._latest = None
        self._patches.undo()
        self.cache.remove()

    def _refusal_reason(self, timestep: Any) -> str | None:
        scheduler, steps = self._scheduler_of(timestep), None
        if scheduler is None and self._latest is not None:
            # Its own number of steps may be that of another picture.
            scheduler, steps = self._latest.scheduler, whole_schedule(timestep)
        if scheduler is None or steps is None:
            steps = getattr(scheduler, "num_inference_steps", None)
        name = type(scheduler).__name__.removesuffix("Scheduler")
        models = [self._unet, *(net for each in list(self._followed) for net in each.nets)]
        if any(map(compiled_modules, models)):
            return f"a UNet or ControlNet: {TORCH_COMPILES}"
        return distilled_reason(self._unet) or few_steps_reason(name, steps)

    def _scheduler_of(self, timestep: Any) -> Any:
        """The scheduler whose tensor a timestep is an element of, or None."""
        if isinstance(timestep, torch.Tensor):
            for each in list(self._followed):
                timesteps = getattr(each.scheduler, "timesteps", None)
                if isinstance(timesteps, torch.Tensor) and are_of_one_tensor(timesteps, timestep):
                    return each.scheduler
        return None


class _FollowedPipe:
    """What one of the pipelines with this UNet tells. The pipeline keeps it alive.

    Args:
        pipe: The pipeline.
        switch: Of its UNet.
    """

    def __init__(self, pipe: Any, switch: Switch) -> None:
        self.pipe, self._cache = pipe, switch.cache
        self._patches = Patches()
        self.nets: list[nn.Module] = []
        self._hooks: list[Any] = []
        if hasattr(pipe, "maybe_free_model_hooks"):
            ended = _EndingPicture(pipe.maybe_free_model_hooks, switch, self)
            self._patches.set(pipe, "maybe_free_model_hooks", ended)
        self.follow_controlnets()

    @property
    def scheduler(self) -> Any:
        """The pipeline's scheduler now."""
        return getattr(self.pipe, "scheduler", None)

    def follow_controlnets(self) -> None:
        """Note when the ControlNets that the pipeline has now begin and end."""
        controlnet = getattr(self.pipe, "controlnet", None)
        nets = getattr(controlnet, "nets", None) or [controlnet]
        nets = [net for net in nets if isinstance(net, nn.Module)]
        if nets == self.nets:
            return
        self._unhook()
        self.nets = nets
        for index, net in enumerate(nets):
            hook = NoteControl(str(ComponentId(Role.CONTROLNET, index)), self._cache)
            self._hooks.append(net.register_forward_pre_hook(hook, with_kwargs=True))

    def leave(self) -> None:
        """Leave the pipeline as it was."""
        self._patches.undo()
        self._unhook()
        self.nets = []

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _EndingPicture(StandIn):
    """The pipeline's method that ends each of its pictures. Keeps what follows the pipeline.

    Attributes:
        switch: Of the UNet that the pipeline had at `enable_deepcache`.
    """

    def __init__(self, method: Callable[..., Any], switch: Switch, followed: _FollowedPipe) -> None:
        self._method, self.switch, self._followed = method, switch, followed

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._method, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.switch.end_picture()
        return self._method(*args, **kwargs)


def switch_of(unet: Any) -> Switch | None:
    """Return what keeps a UNet's DeepCache, or None if it has none of a pipeline."""
    cache = installed_deepcache(unet) if isinstance(unet, nn.Module) else None
    return cache.clock if cache is not None and isinstance(cache.clock, Switch) else None
