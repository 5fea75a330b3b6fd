"""What the transformer blocks of all packages have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from onediff_ext.engine.blocks.family import CONTEXT, NOTHING, TOKENS, BlockCall, BlockFamily

# What stands for the context in a call whose keys and values are computed already.
_PROJECTED = "projected"


class TransformerBlocks(BlockFamily):
    """Self-attention, cross-attention ``attn2`` to a context, and a feed-forward network."""

    quantisable = True
    prompt_layers = ("attn2.to_k", "attn2.to_v")

    @abstractmethod
    def call(
        self,
        block: Any,
        x: torch.Tensor,
        context: torch.Tensor | None,
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        """Call the block's own method: x [B, N, D], context [B, M, C] or None."""

    def bound(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None,
        ahead: bool,
        *statics: tuple[str, Hashable],
    ) -> BlockCall:
        """A call with tokens and perhaps a context.

        Args:
            x: [B, H*W, D].
            context: [B, 77n, C] or None.
            ahead: Only the `prompt_layers` read the context, which may happen ahead of the graph.
            statics: More of them.
        """
        named = (("context", context is not None), *statics)
        if context is None:
            return BlockCall((x,), (TOKENS,), named)
        return BlockCall((x, context), (TOKENS, CONTEXT), named, context if ahead else None)

    def run(
        self,
        block: Any,
        tensors: Sequence[torch.Tensor],
        statics: Mapping[str, Hashable],
    ) -> torch.Tensor:
        x, *others = tensors
        if statics["context"] != _PROJECTED:
            return self.call(block, x, others[0] if others else None, statics)
        keys, values = others
        with _given(block.attn2.to_k, keys), _given(block.attn2.to_v, values):
            return self.call(block, x, keys, statics)

    def project(
        self, block: Any, prompt: torch.Tensor, merged: Mapping[str, torch.Tensor] = NOTHING
    ) -> tuple[torch.Tensor, ...]:
        # keys and values [B, M, heads * width]
        return tuple(
            _linear(block.get_submodule(name), prompt, merged.get(name)).contiguous()
            for name in self.prompt_layers
        )

    def projected(self, call: BlockCall, projections: tuple[torch.Tensor, ...]) -> BlockCall:
        others = tuple((name, value) for name, value in call.statics if name != "context")
        return BlockCall(
            (call.tensors[0], *projections),
            (TOKENS, CONTEXT, CONTEXT),
            (("context", _PROJECTED), *others),
        )

    def widest(self, block: Any, call: BlockCall) -> int:  # noqa: ARG002
        return 8 * call.tensors[0].numel()  # GEGLU's projection: 2 x 4 x width


def _linear(layer: Any, x: torch.Tensor, merged: torch.Tensor | None) -> torch.Tensor:
    """A layer's own output, or that of the layer within with a merged weight."""
    if merged is None:
        output: torch.Tensor = layer(x)
        return output
    return linear(x, merged, layer.get_base_layer().bias)


@contextmanager
def _given(layer: nn.Module, output: torch.Tensor) -> Iterator[None]:
    """Have a layer return this, whatever it is called with."""
    vars(layer)["forward"] = lambda *_: output
    try:
        yield
    finally:
        del vars(layer)["forward"]
