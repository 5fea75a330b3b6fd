"""Compiling, undoing, builds, captures, DeepCache."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random

import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig

from onediff_ext.core.deepcache_options import MIN_STEPS
from onediff_ext.hosts.diffusers.compile import compiled_state
from onediff_ext.hosts.diffusers.deepcache import enable_deepcache
from tests.differential.registry import feature, operation
from tests.differential.world import World


def _compiled(world: World) -> bool:
    return world.session is not None


@operation(_compiled, weight=0.5)
def undo(world: World, random: Random) -> None:
    world.undo()


@operation(lambda w: w.compiles and w.session is None, weight=8, restores=True)
def compile_again(world: World, random: Random) -> None:
    world.compile()


@operation(_compiled, weight=0.5)
def compile_over(world: World, random: Random) -> None:
    """Without undoing first."""
    world.compile()


@operation(_compiled, weight=0.5)
def new_session(world: World, random: Random) -> None:
    """Stored graphs are loaded again, as by another process."""
    world.undo()
    world.compile()


@feature(_compiled, weight=0.5)
def precision(world: World, random: Random) -> Callable[[], None]:
    """Compiled with another one; a CPU has none of them and says so."""

    def compile_with(precision: str) -> None:
        world.undo()
        world.options["precision"] = precision
        world.compile()

    compile_with("exact" if world.on_gpu else random.choice(("fp8", "int8")))
    return lambda: compile_with("exact")


@operation(_compiled)
def captures_dropped(world: World, random: Random) -> None:
    """Drop CUDA graphs, as the OOM fallback does."""
    assert world.session is not None
    world.session.cuda_graphs.drop_all("the test wants it")


@operation(_compiled, weight=0.5)
def capture_limit(world: World, random: Random) -> None:
    world.limit = random.choice((1, 2, 6))
    world.compile()


@operation(_compiled, then=("graphs_forgotten", "size"))
def builds_held(world: World, random: Random) -> None:
    """From now on few kinds get their graphs, or none."""
    world.hold = random.choice((0, 1, 3))


@operation(lambda w: _compiled(w) and w.hold is not None, weight=8, restores=True)
def builds_released(world: World, random: Random) -> None:
    world.hold = None


@operation(_compiled)
def builds_come_within_a_picture(world: World, random: Random) -> None:
    """Held builds that are released between two steps of the next pictures."""
    world.hold = 0

    def release(pipe: object, step: int, timestep: object, tensors: dict) -> dict:
        world.hold = None
        return tensors

    world.picture.extra.setdefault("callback_on_step_end", lambda world: release)
    world.new_kinds()


@operation(_compiled, weight=0.5, then=("graphs_forgotten", "builds_go_on"))
def cancelled(world: World, random: Random) -> None:
    assert world.session is not None
    world.session.cancel_builds()


@operation(_compiled)
def builds_go_on(world: World, random: Random) -> None:
    assert world.session is not None
    if world.on_gpu:
        world.session.build_in_background()
    else:
        world.session.build_missing()


@operation(_compiled, weight=0.5)
def paused(world: World, random: Random) -> None:
    """Our graphs step aside for one picture."""
    state = compiled_state(world.pipe)
    assert state is not None
    with state.components[0].paused():
        world._outcome(world.pipe)
    world._outcome(world.twin)


@operation(_compiled, weight=0.5, then=("builds_go_on", "again"))
def graphs_forgotten(world: World, random: Random) -> None:
    """Kinds lose their graphs, and get them again by a build."""
    world.new_kinds()


@operation()
def collect(world: World, random: Random) -> None:
    world.others[:] = [other for other in world.others if isinstance(other, DiffusionPipeline)]
    gc.collect()
    if world.on_gpu:
        torch.cuda.empty_cache()


@feature(
    lambda w: (
        w.is_unet and not {"ip_adapter", "no_memory_for_batches"} & w.on.keys() and not w.adapters
    )
)
def deepcache(world: World, random: Random) -> Callable[[], None]:
    interval = random.choice((2, 3))
    pipes = world.both
    for pipe in pipes:
        enable_deepcache(pipe, interval)
    steps, world.picture.steps, world.picture.way = world.picture.steps, MIN_STEPS, "pipe"

    def off() -> None:
        for pipe in pipes:
            enable_deepcache(pipe, 1)
        world.picture.steps = steps

    return off


@feature(lambda w: hasattr(w.twin_denoiser, "enable_cache") and not w.adapters)
def first_block_cache(world: World, random: Random) -> Callable[[], None]:
    """diffusers' own step cache, by hooks on the blocks."""
    threshold = random.choice((0.3, 10.0))
    models = list(world.each_denoiser())
    for model in models:
        model.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    world.picture.steps, world.picture.way = 4, "pipe"
    return lambda: [model.disable_cache() for model in models]  # type: ignore[return-value]
