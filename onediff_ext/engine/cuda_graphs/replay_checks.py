"""Replays of a CUDA graph compared with the model's own forward."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.engine.cuda_graphs.cache import CapturedGraph
from onediff_ext.engine.cuda_graphs.forward_call import tensors_of
from onediff_ext.engine.cuda_graphs.model_tracker import FrozenState

# A CUDA graph is compared on the call that it was recorded for and on the next one. The inputs of
# the two differ, so a computation that depends on them without having them as inputs shows. Such a
# computation shows at one size already: other sizes of the same model state are compared once,
# since a comparison costs a forward.
_REQUIRED_CHECKS = 2

# Why sizes are not replayed for the rest of an image.
UNDECIDED = "its replays cannot be compared: eager gives NaN"


class ReplayChecks:
    """Compares replays, and remembers the model states whose CUDA graphs have passed."""

    def __init__(self) -> None:
        self._passed: dict[Hashable, FrozenState] = {}

    def is_done(self, captured: CapturedGraph) -> bool:
        """Whether a CUDA graph needs no comparison any more.

        Args:
            captured: A CUDA graph of `CudaGraphCache`.
        """
        return captured.checks >= _REQUIRED_CHECKS

    def has_passed(self, form: Hashable, state: FrozenState) -> bool:
        """Whether a CUDA graph of this form and this state has passed all comparisons.

        Args:
            form: Variant and `ForwardCall.form` of the call.
            state: What the model is.
        """
        return state.is_same_as(self._passed.get(form))

    def knows(self, form: Hashable) -> bool:
        """Whether a CUDA graph of this form has passed in any state.

        Args:
            form: As `has_passed` takes it.
        """
        return form in self._passed

    def begin(self, form: Hashable, captured: CapturedGraph) -> None:
        """Leave a new CUDA graph one comparison if another size of its form and state has passed.

        Args:
            form: As `has_passed` takes it.
            captured: Just recorded, with no comparison yet.
        """
        if self.has_passed(form, captured.state):
            captured.checks = _REQUIRED_CHECKS - 1

    def note_passed(self, form: Hashable, captured: CapturedGraph) -> None:
        """Remember a CUDA graph's state, if it has passed all comparisons.

        Args:
            form: As `has_passed` takes it.
            captured: A CUDA graph of `CudaGraphCache`.
        """
        if self.is_done(captured):
            self._passed[form] = captured.state

    def waits(self, captured: CapturedGraph, epoch: int | None) -> bool:
        """Whether a CUDA graph is left alone until the next image.

        A comparison has decided nothing in this one. The numbers of the next steps come from the
        same NaN, so each further comparison would cost a replay for nothing.

        Args:
            captured: A CUDA graph of `CudaGraphCache`.
            epoch: From `epoch_of`.
        """
        return epoch is not None and captured.undecided_in == epoch and not self.is_done(captured)

    def check(
        self, captured: CapturedGraph, replayed: Any, expected: Any, epoch: int | None
    ) -> str | None:
        """Compare a replay's output with eager's, and count the check if it decides anything.

        Args:
            captured: A CUDA graph of `CudaGraphCache`.
            replayed: Its output, a tensor or a structure of tensors.
            expected: The output of the model's own forward, of the same structure.
            epoch: From `epoch_of`.

        Returns:
            What is wrong, or None. After a wrong replay no state counts as passed.

        Raises:
            torch.OutOfMemoryError: There is no memory for the comparison.
        """
        for ours, theirs in zip(tensors_of(replayed), tensors_of(expected), strict=True):
            comparison = compare(ours, theirs)
            if comparison.problem is not None:
                self.forget()
                return comparison.problem
            if not comparison.decided:
                captured.undecided_in = epoch
                return None
        captured.checks += 1
        return None

    def forget(self) -> None:
        """Let no state count as passed."""
        self._passed.clear()
