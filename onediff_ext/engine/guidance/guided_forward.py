"""A denoiser's forward that runs the prompt's half of the batch alone in some steps.

Guidance is ``negative + scale * (prompt - negative)``. With the prompt's prediction in both halves
it is the prompt's prediction, whatever the scale, and whatever is done to it afterwards.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.engine.cfg_parallel.call_halves import NOTHING_TO_SPLIT, CallHalves
from onediff_ext.engine.class_methods import forward_slot, inner_forward_of
from onediff_ext.engine.cuda_graphs.argument_containers import ArgumentContainers
from onediff_ext.engine.cuda_graphs.half_batches import joined
from onediff_ext.engine.guidance.alike_predictions import AlikePredictions
from onediff_ext.engine.guidance.attention_gate import AttentionGate, LayerReason
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import is_dynamo_tracing

logger = logging.getLogger(__name__)


class GuidedCall(NamedTuple):
    """A call whose batch is [negative prompt, prompt], or [prompt, negative prompt].

    Args:
        step: Number of the picture's step, from 0. Samplers such as Heun's call twice in one.
        steps: All steps of the picture.
        latents: [2B, C, h, w].
        is_prompt_first: Which of both it is.
        of_prompt: Keyword arguments that a call of the prompt's half gets in place of the call's
            own. All others are halved.
        prompt: Identifies the prompt: equal for steps with the same one.
        is_last: Whether it is known that the picture has no call after it. A VAE needs memory then.
    """

    step: int
    steps: int
    latents: torch.Tensor
    is_prompt_first: bool = False
    of_prompt: Mapping[str, Any] = MappingProxyType({})
    prompt: Hashable = None
    is_last: bool = False


# Tells what a call is, or why it has to run whole. Reads no tensor's values.
CallReader = Callable[[Sequence[Any], Mapping[str, Any]], GuidedCall | str]

# The forwards whose pictures this thread draws, outermost first.
_drawn = threading.local()


class GuidedForward(StandIn):
    """Draws one picture, or one batch of pictures, with guidance in some of its steps.

    It stands in place of the denoiser's forward while the picture is drawn, around DeepCache and
    CUDA graphs: for them, half of the batch is another size. Calls of other threads, and of another
    picture that is drawn meanwhile, pass through.

    Args:
        model: The host's denoiser.
        options: Which steps have guidance.
        read_call: Of the host.
        layer_reason: As for `AttentionGate`.

    Attributes:
        counts: How many calls ran with "guidance", for the "prompt" alone, and "whole" because
            `read_call` could not tell.
        reason: Why the last one of these ran whole, or "".
        gate: Freezes cross-attention; None where the options want none.
    """

    def __init__(
        self,
        model: nn.Module,
        options: GuidanceOptions,
        read_call: CallReader,
        layer_reason: LayerReason = lambda _: None,
    ) -> None:
        self._model, self._options, self._read_call = model, options, read_call
        self._inner = inner_forward_of(model)
        self._halves = CallHalves()
        self._alike = AlikePredictions(options.similarity)
        self._step = -1
        self._patches = Patches()
        self.counts: Counter[str] = Counter()
        self.reason = ""
        has_gate = options.method == "gate"
        self.gate = AttentionGate(model, layer_reason) if has_gate else None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw the picture within the ``with`` block; afterwards the model is as it was before."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Begin the picture, on this thread. It becomes the outermost wrapper of the forward."""
        self._stand()
        _pictures().append(self)

    def end(self) -> None:
        """End the picture: the model is as it was before. A second call does nothing."""
        if self in _pictures():
            _pictures().remove(self)
        self._halves.forget()
        if self.gate is not None:
            self.gate.forget()
        self._leave()

    def _stand(self) -> None:
        """Stand around what the model's forward is now."""
        self._inner = inner_forward_of(self._model)
        self._patches.set(self._model, forward_slot(self._model), self)

    def _leave(self) -> None:
        for name in self._patches.undo():
            logger.warning("another extension has replaced %s since", name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # A copied model runs its own forward.
        return copy.deepcopy(self._inner, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return self._inner(*args, **kwargs)
        if not self._is_drawn_here:
            with nullcontext() if self.gate is None else self.gate.lock:
                return self._inner(*args, **kwargs)
        call = self._read_call(args, kwargs)
        if isinstance(call, str):
            return self._whole(call, args, kwargs)
        if call.step != self._step:
            self._step = call.step
            self._alike.begin_step()
        if not self._options.has_guidance(call.step, call.steps) or self._alike.have_all_ended:
            return self._prompt_alone(call, args, kwargs)
        self.counts["guidance"] += 1
        run = partial(self._inner, *args, **kwargs)
        is_kept = self._options.keeps_attention(call.step, call.steps) and not call.is_last
        if self.gate is not None and is_kept:
            return self.gate.keep(call.latents, call.prompt, run)
        output = run()
        if self._options.method != "adaptive":
            return output
        return self._alike.compared(output, call.is_prompt_first)

    @property
    def _is_drawn_here(self) -> bool:
        """Whether it is the last one of those of this model whose pictures this thread draws."""
        ours = [each for each in _pictures() if each._model is self._model]
        return bool(ours) and ours[-1] is self

    def _prompt_alone(self, call: GuidedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        split = {name: value for name, value in kwargs.items() if name not in call.of_prompt}
        device = call.latents.device
        halves = self._halves.split(args, split, device, device, None)
        if halves is None:
            return self._whole(NOTHING_TO_SPLIT, args, kwargs)
        self.counts["prompt"] += 1
        containers, half = ArgumentContainers(args, split), halves[not call.is_prompt_first]
        run = partial(self._inner, *half.args, **half.kwargs, **call.of_prompt)
        gate = self.gate
        output = run() if gate is None else gate.freeze(call.latents, call.prompt, run)
        if gate is not None and call.is_last:
            gate.forget()
        containers.apply(half.containers.changes() or ())
        return joined(output, output)

    def _whole(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.counts["whole"] += 1
        self.reason = reason
        return self._inner(*args, **kwargs)


@contextmanager
def lifted_guidance(model: object) -> Iterator[None]:
    """A context without the pictures' forwards of a model, which wrap what is there at the end.

    A callback may compile the model, or switch DeepCache, while a picture is drawn. What comes then
    belongs under these: a CUDA graph must not contain their decisions.

    Args:
        model: The host's denoiser; others have none of these forwards.
    """
    lifted: list[GuidedForward] = []
    while isinstance(model, nn.Module):
        outermost = vars(model).get(forward_slot(model))
        if not isinstance(outermost, GuidedForward):
            break
        outermost._leave()
        lifted.append(outermost)
    try:
        yield
    finally:
        for each in reversed(lifted):
            each._stand()


def _pictures() -> list[GuidedForward]:
    if not hasattr(_drawn, "pictures"):
        _drawn.pictures = []
    found: list[GuidedForward] = _drawn.pictures
    return found
