"""The cross-attention of one block, whose output may be kept at one step and used at later ones.

Zhang et al. 2024, arXiv:2404.02747 (T-GATE).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.blocks.family import BlockCall, BlockFamily, Refusal
from onediff_ext.engine.class_methods import forward_slot, inner_forward_of
from onediff_ext.engine.half_of_batch import present_half
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import is_dynamo_tracing

KEEP, FROZEN = "keep", "frozen"
_READS_PROMPT = Refusal("cross-attention is frozen, and other layers read the prompt")


class GateMode(threading.local):
    """What cross-attention does in the forward that runs in this thread.

    Attributes:
        now: `KEEP`, `FROZEN`, or "" while it is computed as always.
    """

    now = ""

    @contextmanager
    def set(self, mode: str) -> Iterator[None]:
        """Set it for a ``with`` block.

        Args:
            mode: `KEEP` or `FROZEN`.
        """
        self.now = mode
        try:
            yield
        finally:
            self.now = ""


class KeptOutput:
    """The output of one cross-attention layer, at one address.

    Args:
        batch: Pictures at once.

    Attributes:
        tensor: [B, N, D], the mean of both halves; None before the first `store`.
        is_stored: Whether it was written since this was set to False.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.tensor: torch.Tensor | None = None
        self.is_stored = False

    def store(self, output: torch.Tensor) -> None:
        """Write the mean of an output's halves. An output of another form leaves it as it is.

        The first output decides the address, since CUDA graphs freeze it.

        Args:
            output: [2B, N, D], of prompt and negative prompt in any order; [B, N, D] in a forward
                that runs in halves.

        Raises:
            RuntimeError: A CUDA graph is being recorded, and the tensor's memory would belong to
                its pool.
        """
        half = present_half()
        if output.ndim != 3 or output.shape[0] != self._batch * (2 if half is None else 1):
            return
        first, second = output[: self._batch], output[self._batch :]
        if self.tensor is None:
            if first.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a forward was recorded before it ran once")
            # Never an inference tensor: it could not be written to outside of inference mode.
            with torch.inference_mode(False):
                self.tensor = torch.empty_like(first, requires_grad=False)
        kept = self.tensor
        if (kept.shape, kept.dtype, kept.device) != (first.shape, first.dtype, first.device):
            return
        with torch.no_grad():
            if half is None:
                kept.copy_((first + second) / 2)
            elif half == 0:
                kept.copy_(first)
            else:
                kept.add_(first).div_(2)
        self.is_stored = half != 0


class GatedAttention:
    """The cross-attention ``attn2`` of one block while a picture with a gate is drawn.

    Args:
        block: The host's module.
        mode: Of the model.

    Attributes:
        kept: Its output for the present size.
    """

    def __init__(self, block: nn.Module, mode: GateMode) -> None:
        self._layer, self._mode = block.get_submodule("attn2"), mode
        self.kept = KeptOutput(0)

    @property
    def keeps(self) -> bool:
        """Whether the present forward keeps the output: the block runs eager."""
        return self._mode.now == KEEP

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the block's own method with its cross-attention as the mode says.

        Args:
            forward: The method.
            args, kwargs: Of the call.

        Returns:
            The method's output.
        """
        if not self._mode.now:
            return forward(*args, **kwargs)
        with self.in_place():
            return forward(*args, **kwargs)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand in place of the layer's forward within the ``with`` block."""
        patches = Patches()
        patches.set(self._layer, forward_slot(self._layer), _Layer(self, self._layer, self._mode))
        try:
            yield
        finally:
            patches.undo()

    def graph_call(self, family: BlockFamily, call: BlockCall) -> BlockCall | Refusal:
        """Return a block's call as its graph takes it in the present mode.

        Args:
            family: Of the block.
            call: From `BlockFamily.sort`.

        Returns:
            The call itself while cross-attention is computed; a refusal where other layers of the
            block read the prompt.
        """
        frozen = self.frozen(call.tensors[0])
        if frozen is None:
            return call
        return _READS_PROMPT if call.prompt is None else family.with_attention(call, frozen)

    def frozen(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the output to use in place of the layer's own; None to compute it.

        Args:
            x: The block's or the layer's input [B, N, D].
        """
        kept, half = self.kept.tensor, present_half()
        if self._mode.now != FROZEN or kept is None:
            return None
        if half is not None:  # the rows that `run_in_halves` gives to each
            middle = kept.shape[0] // 2
            kept = kept[middle:] if half else kept[:middle]
        return kept if kept.shape[:2] == x.shape[:2] else None


class _Layer(StandIn):
    """Stands in place of the layer's forward."""

    replaced = None

    def __init__(self, attention: GatedAttention, layer: nn.Module, mode: GateMode) -> None:
        self._attention, self._mode, self._forward = attention, mode, inner_forward_of(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)  # a copied model computes its attention

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frozen = None if is_dynamo_tracing() else self._attention.frozen(x)
        if frozen is not None:
            return frozen
        output = self._forward(x, *args, **kwargs)
        if self._mode.now == KEEP:
            self._attention.kept.store(output)
        return output
