"""T-GATE written out: cross-attention is replaced by what it returned at the gate's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Layer = Callable[..., torch.Tensor]


@contextmanager
def plain_gate(pipe: Any, guided: int, calls_a_step: int = 1) -> Iterator[None]:
    """Have a pipeline's UNet run whole, with frozen cross-attention after the gate.

    Both halves of the batch have the mean of the outputs there, and the prompt's prediction.

    Args:
        pipe: Eager.
        guided: Steps with guidance, of each picture that is drawn within the ``with`` block.
        calls_a_step: Of the sampler.
    """
    blocks = [module for module in pipe.unet.modules() if hasattr(module, "attn1")]
    layers = [block.attn2 for block in blocks if block.attn2 is not None]
    kept: dict[int, torch.Tensor] = {}
    calls = 0

    def place(layer: Any, own: _Layer) -> _Layer:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if calls >= guided * calls_a_step:
                return torch.cat([kept[id(layer)]] * 2)
            output = own(*args, **kwargs)
            negative, prompt = output.chunk(2)
            kept[id(layer)] = (negative + prompt) / 2
            return output

        return forward

    def hook(_: Any, __: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= guided * calls_a_step:
            return output
        prompt = output[0].chunk(2)[1]
        return (torch.cat([prompt, prompt]),)

    for layer in layers:
        layer.forward = place(layer, layer.forward)
    handle = pipe.unet.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        for layer in layers:
            del layer.forward
