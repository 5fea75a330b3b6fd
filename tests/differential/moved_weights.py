"""CUDA graphs that read weights which were moved and given back to the GPU: a fault, put in here.

    python -m tests.differential.moved_weights --store FOLDER

`tests.differential.memcheck --planted` runs it under NVIDIA's compute-sanitizer, which has to find
the reads. The process says what it has seen. It ends with an error where there is nothing to be
found: no replay before the weights move, no weight whose memory is given back, or no replay of the
same CUDA graph afterwards.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tests.differential.world import World

# Pictures until their forwards are replayed and no longer compared with eager, at most.
_MOST_PICTURES = 8
# Weights of which an error says who holds their old memory. Each takes a look at all objects of
# the process, which are many in one that has run many tests.
_SHOWN = 3


class NothingToFindError(AssertionError):
    """No CUDA graph has read a weight that was given back, so no check of memory could find it."""


@dataclass(frozen=True)
class Seen:
    """What happened.

    Args:
        replays_before: Of all CUDA graphs, until the weights moved.
        replays_after: Of the last CUDA graph among these, since then.
        given_back_bytes: Of the weights whose memory the GPU's driver has got back. On a CPU, of
            all weights.
        drawn: The last picture, or the error that it ended with.
    """

    replays_before: int
    given_back_bytes: int
    replays_after: int
    drawn: torch.Tensor | BaseException

    def __str__(self) -> str:
        ended = repr(self.drawn)[:200] if isinstance(self.drawn, BaseException) else "drawn"
        return (
            f"replays_before={self.replays_before} given_back_bytes={self.given_back_bytes}"
            f" replays_after={self.replays_after} last_picture={ended}"
        )


def read_moved_weights(world: World, *, planted: bool = True) -> Seen:
    """Draw with CUDA graphs, move all weights, give their memory back, and draw again.

    Args:
        world: A compiled pipeline. Its own weights are all that moves.
        planted: Whether the engine takes the weights for where they were.

    Raises:
        NothingToFindError: No forward is replayed before the weights move, the memory of no weight
            was given back, or the fault is put in and the CUDA graph is not replayed afterwards.
    """
    import pytest

    from onediff_ext.engine.cuda_graphs import staleness

    world.options["spot_checks"] = False  # after one of them, eager's picture is shown
    world.undo()
    world.compile()
    model = world.denoiser(world.pipe)
    weights = [*model.parameters(), *model.buffers()]
    with _lying_apart(weights, world):
        mismatch = world.settle() if world.on_gpu else None
        for _ in range(_MOST_PICTURES):
            if mismatch is not None or _is_replayed(world):
                break
            mismatch = world.compare()
        if mismatch is not None or not _is_replayed(world):
            raise NothingToFindError(f"before the weights move: {mismatch or _state(world)}")
        before, graph = world.replays, _captured(world).replayed_from
        places = {id(weight): weight.data_ptr() for weight in weights}
        sizes = {weight.data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
        copies = [weight.data.clone() for weight in weights]  # before any memory is free again
        old = [weight.untyped_storage() for weight in weights]
        for weight, copy in zip(weights, copies, strict=True):
            weight.data = copy
        gc.collect()
        holders = Counter(_holders_of(old, i) for i in range(min(len(old), _SHOWN)))
        del old
    given_back = _given_back_bytes(sizes, holders, world)
    replay, replayed = graph.recording.replay, list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph.recording, "replay", lambda: (replayed.append(1), replay()))
        if planted:
            patch.setattr(staleness, "_where", lambda tensors: [places[id(t)] for t in tensors])
        drawn = world._outcome(world.pipe)
    seen = Seen(before, given_back, len(replayed), drawn)
    if planted and not seen.replays_after:
        raise NothingToFindError(f"after the weights have moved: {_state(world)}; {seen}")
    return seen


@contextmanager
def _lying_apart(weights: Sequence[torch.Tensor], world: World) -> Iterator[None]:
    """Until the end of the ``with`` block, the weights' memory has nothing else in it.

    Otherwise small tensors share their memory with others, so that it never goes back to the
    driver.
    """
    import torch

    if not world.on_gpu:
        yield
        return
    # Who allocated what still lies there.
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
    pool = torch.cuda.MemPool()
    with torch.cuda.device(world.device), torch.cuda.use_mem_pool(pool):
        for weight in weights:
            weight.data = weight.data.clone()
    yield
    del pool


def _holders_of(storages: list[torch.UntypedStorage], i: int) -> str:
    """Who else holds a storage: how many tensors, and by what Python's own references."""
    import torch

    tensors = torch._C._storage_Use_Count(storages[i]._cdata) - 1
    seen = {id(storages), id(sys._getframe())}
    return f"{tensors} tensors, {_above(storages[i], seen, levels=6)}"


def _above(held: object, seen: set[int], levels: int) -> str:
    """The types of what refers to an object, of what refers to that, and so on."""
    found = [each for each in gc.get_referrers(held) if id(each) not in seen]
    seen.update((id(found), id(sys._getframe()), *map(id, found)))
    if not found or not levels:
        return ""
    names = sorted(
        each.f_code.co_name if isinstance(each, FrameType) else type(each).__qualname__
        for each in found[:8]
    )
    above = next(filter(None, (_above(each, seen, levels - 1) for each in found[:8])), "")
    return f"{names} < {above}"


def _given_back_bytes(sizes: Mapping[int, int], holders: Mapping[str, int], world: World) -> int:
    """Give free memory back to the GPU's driver.

    Args:
        sizes: Of memory that should be free now, by address.
        holders: How many of the first weights' old memory is held so.
        world: Of whose device it is.

    Returns:
        How much of it is neither in use nor kept by torch.

    Raises:
        NothingToFindError: Nothing is.
    """
    import torch

    if not world.on_gpu:
        return sum(sizes.values())
    torch.cuda.synchronize(world.device)
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_snapshot()
    holding = {at: _segment_of(at, kept) for at in sizes}
    found = sum(size for at, size in sizes.items() if holding[at] is None)
    if not found:
        segment = next(iter(holding.values()))
        raise NothingToFindError(
            f"torch keeps the memory of all {len(sizes)} weights that moved, such as {segment}."
            f" Who holds the first ones: {dict(holders)}"
        )
    return found


def _segment_of(at: int, kept: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What torch keeps there: memory from the driver, without the list of its parts."""
    for segment in kept:
        if at in range(segment["address"], segment["address"] + segment["total_size"]):
            parts = Counter(
                (part["state"], *(_place_of(frame) for frame in part.get("frames", ())[:3]))
                for part in segment["blocks"]
            )
            return {**segment, "blocks": dict(parts)}
    return None


def _place_of(frame: Mapping[str, Any]) -> str:
    return f"{Path(frame['filename']).name}:{frame['line']}"


def _captured(world: World) -> Any:
    from onediff_ext.hosts.diffusers.compile import compiled_state

    state = compiled_state(world.pipe)
    assert state is not None
    return state.components[0].captured


def _is_replayed(world: World) -> bool:
    """Whether the last forward was replayed, and its output was used without a comparison."""
    return world.replays > 0 and bool(_captured(world).replayed)


def _state(world: World) -> str:
    return f"{world.replays} replays, {_captured(world).reason or 'no reason'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential.moved_weights")
    parser.add_argument("--store", type=Path, required=True, help="graphs are kept here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="sd15-wide", help="of the differential's")
    parser.add_argument("--world", type=int, default=7, help="the seed of its models")
    options = parser.parse_args(arguments)
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    warnings.simplefilter("ignore")

    import torch

    from tests.differential.sequences import Driver

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    driver = Driver(options.device, store=options.store, model=options.model)
    with driver._world(options.world) as (world, mismatch):
        if mismatch is not None:
            raise NothingToFindError(f"before the weights move: {mismatch}")
        # At once: behind the fault the GPU may not serve this process any more.
        print(read_moved_weights(world), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
