"""The part of a model's forward that depends on the prompt alone, recorded by itself.

Keys and values of all cross-attention are the same at every step of a picture and at every size.
They have one recording, which is replayed when the prompt or the weights may be others, and the
captures of all sizes read what it wrote last.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from onediff_ext.engine.cuda_graphs.memory_reads import owned, record_and_look
from onediff_ext.engine.cuda_graphs.recorder import Recorder
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.running.text_kv import PinnedTextKv, stamp_of


class TextKvGraph:
    """Projections of one prompt tensor for all blocks that read it.

    Args:
        recorder: Makes the recording.
        prompt: What the blocks were called with last; the part has a tensor like it.
        runners: Of these blocks.
        snapshot: What the model is; captures that were made of another one must not use it.

    Attributes:
        source: The tensor that the recording reads.
        recording: Writes the projections.

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
    ) -> None:
        self.snapshot, self.runners = snapshot, tuple(runners)
        with torch.inference_mode(False):  # or it could not be written outside of it
            self.source = torch.empty_like(prompt, device=device, requires_grad=False)
        self.source.copy_(prompt)
        self._prompt: weakref.ref[torch.Tensor] | None = None
        self._stamp: Hashable = None
        source = self.source
        self._weights = [weight for runner in self.runners for weight in runner.prompt_weights()]
        self.recording, reads = record_and_look(
            recorder,
            lambda: [runner.project(source) for runner in self.runners],
            device,
            lasting=True,
        )
        self._owns = owned(reads, snapshot.places(), [source])

    def serves(self, snapshot: Snapshot, runners: Sequence[BlockRunner]) -> bool:
        """Whether it reads the weights that these blocks have now."""
        return (
            self.snapshot is snapshot
            and self.runners == tuple(runners)
            and [w.data_ptr() for runner in runners for w in runner.prompt_weights()]
            == [w.data_ptr() for w in self._weights]
        )

    def bring(self, prompt: torch.Tensor) -> None:
        """Make the projections those of this prompt, if they may be others."""
        stamp = stamp_of(self.runners[0].epoch, prompt, self._weights)
        known = self._prompt() if self._prompt is not None else None
        if stamp is not None and known is prompt and stamp == self._stamp:
            return
        self._prompt = None  # nothing is known until all of it has happened
        self.source.copy_(prompt)
        self.recording.replay()
        self._prompt, self._stamp = weakref.ref(prompt), stamp

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """While a capture is recorded: blocks called with `source` take the projections."""
        with ExitStack() as stack:
            for runner, tensors in zip(self.runners, self.recording.output, strict=True):
                stack.callback(setattr, runner, "projections", None)
                runner.projections = PinnedTextKv(self.source, tensors)
            yield


def readers(
    runners: Sequence[BlockRunner], tensors: Sequence[torch.Tensor]
) -> dict[int, list[BlockRunner]]:
    """Which blocks have projected which of a call's tensors: runners by the tensor's index."""
    found: dict[int, list[BlockRunner]] = {}
    places = {id(tensor): i for i, tensor in enumerate(tensors)}
    for runner in runners:
        prompt = runner.projections.prompt if runner.projections is not None else None
        if prompt is not None and id(prompt) in places:
            found.setdefault(places[id(prompt)], []).append(runner)
    return found
