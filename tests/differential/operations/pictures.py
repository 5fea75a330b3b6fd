"""Operations on the picture's arguments, and on torch's modes."""

from __future__ import annotations

from random import Random

import torch
from torch.utils._pytree import tree_leaves

from tests.differential.drawing import ways
from tests.differential.registry import operation
from tests.differential.world import SIZES, TRANSFORMER_SIZES, World


@operation(weight=6, restores=True)
def again(world: World, random: Random) -> None:
    """The same once more: what was captured is replayed."""


@operation(weight=3, then=("again",))
def size(world: World, random: Random) -> None:
    sizes = SIZES if world.is_unet else TRANSFORMER_SIZES
    world.picture.height, world.picture.width = random.choice(sizes)


@operation()
def odd_size(world: World, random: Random) -> None:
    step = 8 if world.is_unet else 16
    sides = (step * random.randint(40 // step, 112 // step) for _ in range(2))
    world.picture.height, world.picture.width = sides


@operation()
def batch(world: World, random: Random) -> None:
    world.picture.batch = random.randint(1, 3)


@operation(weight=2)
def noise(world: World, random: Random) -> None:
    world.picture.noise = random.randrange(100)


@operation(lambda w: "deepcache" not in w.on)  # it reuses nothing in few steps
def steps(world: World, random: Random) -> None:
    world.picture.steps = random.randint(1, 4)


@operation(weight=2, then=("prompt_in_place", "prompt_between_steps"))
def prompt(world: World, random: Random) -> None:
    world.new_prompt(random.randrange(1000))


@operation(then=("prompt_in_place",))
def prompt_in_place(world: World, random: Random) -> None:
    """The same tensors with other numbers."""
    for tensor in world.prompt_tensors:
        with torch.inference_mode(tensor.is_inference()):
            tensor.mul_(random.choice((0.5, -1.0)))


@operation()
def prompt_under_inference_mode(world: World, random: Random) -> None:
    """Tensors that count no versions."""
    with torch.inference_mode():
        world.new_prompt(random.randrange(1000))
    world.picture.inference = True


@operation()
def tokens(world: World, random: Random) -> None:
    world.picture.tokens = random.choice((77, 154, 33))
    world.new_prompt(random.randrange(1000))


@operation()
def guidance(world: World, random: Random) -> None:
    world.picture.guidance = random.choice((1.0, 2.0, 4.0))


@operation(lambda w: w.is_unet)
def guidance_rescale(world: World, random: Random) -> None:
    if world.picture.extra.pop("guidance_rescale", None) is None:
        world.picture.extra["guidance_rescale"] = 0.7


@operation(weight=2)
def way(world: World, random: Random) -> None:
    """Another caller of the model, with other kinds of argument."""
    world.picture.way = random.choice(ways(world))


@operation(then=("again",))
def prompt_between_steps(world: World, random: Random) -> None:
    """The model alone is called, and the prompt's tensor written between two calls."""
    world.picture.way = "prompt_written" if world.is_unet else "transformer_prompt_written"
    world.picture.steps = max(2, world.picture.steps)


@operation(lambda w: w.is_unet, then=("again",))
def two_streams(world: World, random: Random) -> None:
    """Two callers of the UNet take turns, on a GPU with streams of their own."""
    world.picture.way = "two_streams"


@operation(lambda w: "guided_in_some_steps" in ways(w), then=("again",))
def guided_in_some_steps(world: World, random: Random) -> None:
    """Guidance in the first half of the steps."""
    world.picture.way = "guided_in_some_steps"
    world.picture.steps = max(2, world.picture.steps)
    world.picture.guidance = 3.0


@operation(weight=2)
def by_the_pipeline(world: World, random: Random) -> None:
    world.picture.way = "pipe"


@operation()
def inference_mode(world: World, random: Random) -> None:
    """Or no_grad instead."""
    made = any(tensor.is_inference() for tensor in world.prompt_tensors)
    world.picture.inference = made or not world.picture.inference


@operation()
def thread(world: World, random: Random) -> None:
    """Draw in threads (on a GPU with streams) of their own from now on, or no more."""
    world.picture.in_thread = not world.picture.in_thread


@operation()
def one_picture(world: World, random: Random) -> None:
    """Say what a picture is, or no more."""
    world.picture.as_picture = not world.picture.as_picture


@operation(weight=2, then=("again",))
def autocast(world: World, random: Random) -> None:
    world.picture.autocast = not world.picture.autocast


@operation()
def scheduler(world: World, random: Random) -> None:
    from diffusers import (
        DDIMScheduler,
        EulerDiscreteScheduler,
        FlowMatchEulerDiscreteScheduler,
        FlowMatchHeunDiscreteScheduler,
        UniPCMultistepScheduler,
    )

    cls = random.choice((DDIMScheduler, EulerDiscreteScheduler, UniPCMultistepScheduler))
    if not world.is_unet:
        cls = random.choice((FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler))
    for pipe in world.both:
        pipe.scheduler = cls.from_config(pipe.scheduler.config)


@operation(then=("again",))
def callback_writes_the_prompt(world: World, random: Random) -> None:
    """Change the prompt within a picture, as some scripts do, or no more."""

    def changed(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        for tensor in tree_leaves(tensors["prompt_embeds"]):
            tensor.mul_(0.5)
        return tensors

    extra = world.picture.extra
    if extra.pop("callback_on_step_end", None) is None:
        # What can be called is called with the world first.
        extra["callback_on_step_end"] = lambda world: changed
        extra["callback_on_step_end_tensor_inputs"] = ["prompt_embeds"]
        world.picture.way, world.picture.steps = "pipe", max(2, world.picture.steps)
    else:
        extra.pop("callback_on_step_end_tensor_inputs", None)
