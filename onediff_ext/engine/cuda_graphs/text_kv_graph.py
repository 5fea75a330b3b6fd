"""The text KV cache of a CUDA graph: keys and values of a prompt, recorded by themselves.

Keys and values of all cross-attention are the same at every step of an image and at every size. One
recording computes them. It is replayed when the prompt or the weights may have changed, and the
CUDA graphs of all sizes read what it wrote last.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from onediff_ext.engine.cuda_graphs.memory_reads import (
    MemoryReads,
    owned_storages,
    record_and_observe,
)
from onediff_ext.engine.cuda_graphs.recorder import Recorder
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.running.text_kv import PinnedTextKv, stamp_of
from onediff_ext.engine.weak_tensors import WeakTensors


class TextKvGraph:
    """Computes the keys and values of one prompt tensor for all blocks that read it.

    Args:
        recorder: Makes the recording.
        prompt: What the blocks were called with last, [2B, 77n, D].
        runners: Of these blocks.
        snapshot: What the model is; CUDA graphs of another state must not use this.
        device: Where the blocks run.
        streamed: As `MemoryReads` takes it.

    Attributes:
        source: The tensor that the recording reads, of the prompt's shape.
        recording: Writes the keys and values.

    Raises:
        CaptureError, torch.OutOfMemoryError: As `Recorder.record`.
    """

    def __init__(
        self,
        recorder: Recorder,
        prompt: torch.Tensor,
        runners: Sequence[BlockRunner],
        snapshot: Snapshot,
        device: torch.device,
        streamed: frozenset[int],
    ) -> None:
        self.snapshot, self.runners = snapshot, tuple(runners)
        with torch.inference_mode(False):  # or it could not be written to outside of it
            self.source = torch.empty_like(prompt, device=device, requires_grad=False)
        self.source.copy_(prompt)
        self._prompt: weakref.ref[torch.Tensor] | None = None
        self._stamp: Hashable = None
        source = self.source
        self._weights = WeakTensors(
            weight for runner in self.runners for weight in runner.text_kv.layer_weights()
        )
        reads = MemoryReads(device, streamed)
        self.recording = record_and_observe(
            recorder,
            lambda: [runner.text_kv.compute(source) for runner in self.runners],
            reads,
            lasting=True,
        )
        self._owned_storages = owned_storages(reads, snapshot.places(), [source])

    def serves(self, snapshot: Snapshot, runners: Sequence[BlockRunner]) -> bool:
        """Whether the recording reads the weights that these blocks have now.

        Args:
            snapshot: What the model is now.
            runners: Of the blocks that read the prompt now.
        """
        weights = self._weights.alive()
        return (
            weights is not None
            and self.snapshot is snapshot
            and self.runners == tuple(runners)
            and [w.data_ptr() for runner in runners for w in runner.text_kv.layer_weights()]
            == [w.data_ptr() for w in weights]
        )

    def update(self, prompt: torch.Tensor) -> None:
        """Compute the keys and values of this prompt, unless they are certainly there already.

        Args:
            prompt: Of the shape and dtype of `source`.
        """
        weights = self._weights.alive()
        stamp = None
        if weights is not None and not any(r.text_kv.has_functions for r in self.runners):
            stamp = stamp_of(self.runners[0].epoch, prompt, weights)
        known = self._prompt() if self._prompt is not None else None
        if stamp is not None and known is prompt and stamp == self._stamp:
            return
        self._prompt = None  # in case what follows fails halfway
        self._compute(prompt)
        self._prompt, self._stamp = weakref.ref(prompt), stamp

    def _compute(self, prompt: torch.Tensor) -> None:
        self.source.copy_(prompt)
        self.recording.replay()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """While a forward is recorded, blocks called with `source` use these keys and values."""
        with ExitStack() as stack:
            for runner, tensors in zip(self.runners, self.recording.output, strict=True):
                stack.callback(setattr, runner.text_kv, "cached", None)
                runner.text_kv.cached = PinnedTextKv(self.source, tensors)
            yield


def readers(
    runners: Sequence[BlockRunner], tensors: Sequence[torch.Tensor]
) -> dict[int, list[BlockRunner]]:
    """The blocks that compute keys and values from a tensor of a call, and did so last.

    Args:
        runners: Of all blocks of a model.
        tensors: Of the call.

    Returns:
        Runners by the tensor's index.
    """
    found: dict[int, list[BlockRunner]] = {}
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    for runner in runners:
        # At a gate's step blocks run eager, and after it they have no cross-attention.
        cached = None if runner.attention is not None else runner.text_kv.cached
        prompt = cached.prompt if cached is not None else None
        if prompt is not None and id(prompt) in places:
            found.setdefault(places[id(prompt)], []).append(runner)
    return found
