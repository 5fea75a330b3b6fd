"""Faults in the middle of a picture: errors, interrupts, lack of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import nn

from tests.differential.registry import feature, operation
from tests.differential.world import World


def _once(world: World, random: Random, make: Callable[[], BaseException], both: bool) -> None:
    """Draw a picture within which a layer raises; then draw on without."""
    names: Sequence[str] = ("conv_out", "mid_block.resnets.0.conv1", "time_embedding.linear_1")
    if not world.is_unet:
        names = [n for n, m in world.twin_denoiser.named_modules() if type(m) is nn.Linear]
    name = random.choice(names)
    at = random.randint(1, 2)
    for pipe in world.both if both else (world.pipe,):
        module = world.denoiser(pipe).get_submodule(name)
        calls: list[int] = []

        def fail(module: Any, args: Any, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == at:
                raise make()

        handle = module.register_forward_pre_hook(fail)
        try:
            world._outcome(pipe)
        finally:
            handle.remove()


@operation()
def error(world: World, random: Random) -> None:
    _once(world, random, lambda: RuntimeError("of another extension"), both=True)


@operation()
def interrupt(world: World, random: Random) -> None:
    _once(world, random, KeyboardInterrupt, both=True)


@operation(lambda w: not w.counts_calls)
def out_of_memory(world: World, random: Random) -> None:
    """Only ours; it has ways out."""
    _once(world, random, lambda: torch.OutOfMemoryError("none"), both=False)


@operation(lambda w: not w.on_gpu and w.session is not None)
def no_memory_for_a_recording(world: World, random: Random) -> None:
    recorder: Any = world.recorders[-1]
    recorder.error = torch.OutOfMemoryError("none")
    try:
        outcomes = [world._outcome(pipe) for pipe in world.both]
    finally:
        recorder.error = None
    del outcomes


@operation(lambda w: w.session is not None, weight=0.5)
def interrupted_callback(world: World, random: Random) -> None:
    """A user's stop between two steps."""

    def stop(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        raise KeyboardInterrupt

    extra = world.picture.extra
    kept = extra.get("callback_on_step_end")
    extra["callback_on_step_end"] = lambda world: stop
    try:
        for pipe in world.both:
            world._outcome(pipe)
    finally:
        if kept is None:
            del extra["callback_on_step_end"]
        else:
            extra["callback_on_step_end"] = kept


@feature(
    lambda w: (
        w.is_unet
        and not (w.on_gpu or w.counts_calls or "deepcache" in w.on)
        and w.session is not None
    ),
    weight=2,
    then=("images_see_each_other_on",),
)
def no_memory_for_batches(world: World, random: Random) -> Callable[[], None]:
    """Few images of ours find room at once: halves are drawn, or the error is seen.

    Not with DeepCache, which keeps no features of halves: every call is whole then, and the twin's
    are not.
    """
    world.most_images, world.picture.batch, world.picture.guidance = 2, 2, 3.0

    def off() -> None:
        world.most_images = None

    return off
