"""Cross-attention that is computed up to a step of a picture, and frozen from then on.

Zhang et al. 2024, "Cross-Attention Makes Inference Cumbersome in Text-to-Image Diffusion Models",
arXiv:2404.02747 (T-GATE).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.class_methods import forward_slot
from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward
from onediff_ext.engine.deepcache.deepcache_forward import installed_deepcache
from onediff_ext.engine.forward_variants import ForwardVariant, set_variant
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.running.gated_attention import (
    FROZEN,
    KEEP,
    GatedAttention,
    GateMode,
    KeptOutput,
)
from onediff_ext.engine.validity.foreign_code import replaced_methods

NO_ATTENTION = "the model has no blocks with cross-attention that are known"
CHANGED_ATTENTION = "an extension changes cross-attention"
IN_PARTS = "another extension runs the UNet's parts"
NOT_KEPT = "the gate's step did not run as one batch of prompt and negative prompt"
CHANGED = "the prompt has changed since the gate, or another picture was drawn meanwhile"

# Why a layer's output must not be frozen, or None.
LayerReason = Callable[[nn.Module], str | None]
_GATE = "gate"


class AttentionOutputs:
    """The outputs of all cross-attention layers of a model, for one size.

    After the picture nothing keeps them alive, unless a CUDA graph does that has their addresses
    frozen in it. The next picture of this size then writes to the same ones.

    Args:
        batch: Pictures at once.
        count: Number of layers.

    Attributes:
        each: In the order of the layers.
        picture: Whose outputs they are.
    """

    def __init__(self, batch: int, count: int) -> None:
        self.each = [KeptOutput(batch) for _ in range(count)]
        self.picture: object = None
        self._is_replayed = self._was_whole = False

    def tensors(self) -> list[torch.Tensor]:
        """As `KeptTensors.tensors`."""
        return [kept.tensor for kept in self.each if kept.tensor is not None]

    def begin(self, picture: object) -> None:
        """Begin a step that writes them.

        Args:
            picture: Whose step it is.
        """
        self.picture, self._is_replayed = picture, False
        for kept in self.each:
            kept.is_stored = False

    def note_replay(self) -> None:
        """A CUDA graph of the step was replayed, and its Python code did not run."""
        self._is_replayed = True

    def are_whole(self) -> bool:
        """Return whether the step has written all of them."""
        if not self._is_replayed:
            self._was_whole = all(kept.is_stored for kept in self.each)
        return self._was_whole


class _Shared:
    """What all pictures that are drawn with one model share.

    Attributes:
        lock: Held during calls, since a call sets what the blocks do.
        mode: Of the present call.
        alive: Outputs by size and number of layers.
        generation: How often outputs were discarded: CUDA graphs of earlier ones are not used.
    """

    def __init__(self) -> None:
        self.lock, self.mode, self.generation = threading.RLock(), GateMode(), 0
        self.alive: weakref.WeakValueDictionary[Hashable, AttentionOutputs]
        self.alive = weakref.WeakValueDictionary()


_models: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()


class AttentionGate:
    """Freezes the cross-attention of one model for one picture, or one batch of pictures.

    At the gate's step each layer's output is kept: the mean of both halves of the batch, as the
    paper does. In later steps, in which the prompt's half runs alone, it stands for the layer.
    What the layers' outputs are is not told by the forward's arguments, so a `ForwardVariant` does.

    Args:
        model: The host's denoiser.
        layer_reason: Of the host.

    Attributes:
        lock: Calls of the model take turns by it, also those of other pictures.
        frozen: How many calls had frozen cross-attention.
        reason: Why cross-attention is computed in steps after the gate, or "".
    """

    def __init__(self, model: nn.Module, layer_reason: LayerReason) -> None:
        self._model, self._layer_reason = model, layer_reason
        self._shared = _models.setdefault(model, _Shared())
        self.lock = self._shared.lock
        self._blocks: list[tuple[nn.Module, GatedAttention]] = []
        self._kept: AttentionOutputs | None = None
        self._state: Hashable = None
        self.frozen, self.reason = 0, ""

    def keep(self, latents: torch.Tensor, state: Hashable, run: Callable[[], Any]) -> Any:
        """Run a call of the gate's step, and keep the outputs of cross-attention.

        Args:
            latents: Of the call, [2B, C, h, w].
            state: What cross-attention depends on, such as the prompt.
            run: Runs the call.

        Returns:
            The output of the call.
        """
        self._kept, self.reason = None, self._look()
        if self.reason:
            return run()
        size = _size_of(latents)
        key = (size, len(self._blocks))
        with self.lock:
            outputs = self._shared.alive.get(key)
            if outputs is None:
                outputs = AttentionOutputs(latents.shape[0] // 2, len(self._blocks))
                self._shared.alive[key] = outputs
            outputs.begin(self)
            if (deepcache := installed_deepcache(self._model)) is not None:
                deepcache.invalidate()  # a shallow call would leave the deep layers out
            with self._in(KEEP, outputs):
                output = run()
            if outputs.are_whole():
                self._kept, self._state = outputs, (size, state)
            else:
                self._shared.generation += 1
                self._shared.alive.pop(key, None)
        return output

    def freeze(self, latents: torch.Tensor, state: Hashable, run: Callable[[], Any]) -> Any:
        """Run a call after the gate: with frozen cross-attention, or as always with a `reason`.

        Args:
            latents, state: As for `keep`.
            run: Runs the call with the prompt's half of the batch.

        Returns:
            The output of the call.
        """
        with self.lock:
            kept = self._kept
            if kept is None:
                self.reason = self.reason or NOT_KEPT
                return run()
            if kept.picture is not self or (_size_of(latents), state) != self._state:
                self._kept, self.reason = None, CHANGED
                return run()
            self.frozen += 1
            with self._in(FROZEN, kept):
                return run()

    def forget(self) -> None:
        """End the picture: the memory is freed, except what CUDA graphs hold."""
        self._kept = None
        self._blocks = []

    @contextmanager
    def _in(self, mode: str, outputs: AttentionOutputs) -> Iterator[None]:
        """Have all layers keep their outputs, or return kept ones, within the ``with`` block."""
        variant = (mode, self._shared.generation)
        with ExitStack() as stack:
            for (block, attention), kept in zip(self._blocks, outputs.each, strict=True):
                attention.kept = kept
                # As it is now: a callback may compile a pipeline, or undo that, within a picture.
                runner = _runner_of(block)
                if runner is None:
                    stack.enter_context(attention.in_place())
                else:
                    stack.callback(setattr, runner, "attention", None)
                    runner.attention = attention
            stack.callback(set_variant, self._model, None, _GATE)
            told = ForwardVariant(variant, (outputs,), outputs.note_replay)
            set_variant(self._model, told, _GATE)
            with self._shared.mode.set(mode):
                yield

    def _look(self) -> str:
        """Find the blocks with cross-attention, and return why it cannot be frozen, or ""."""
        self._blocks = []
        for module in self._model.modules():
            layer = getattr(module, "attn2", None)
            if module is not self._model and isinstance(
                vars(module).get(forward_slot(module)), CapturedForward
            ):
                return IN_PARTS
            if not isinstance(layer, nn.Module) or not hasattr(module, "attn1"):
                continue
            is_changed = layer._forward_hooks or layer._forward_pre_hooks or replaced_methods(layer)
            reason = CHANGED_ATTENTION if is_changed else self._layer_reason(layer)
            if reason:
                return reason
            self._blocks.append((module, GatedAttention(module, self._shared.mode)))
        return "" if self._blocks else NO_ATTENTION


def _size_of(latents: torch.Tensor) -> Hashable:
    return latents.shape, latents.dtype, latents.device


def _runner_of(block: nn.Module) -> BlockRunner | None:
    return next((each for each in vars(block).values() if isinstance(each, BlockRunner)), None)
