"""The base of all families of transformer blocks, with the text KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from onediff_ext.engine.blocks.family import (
    CONTEXT,
    NOTHING,
    TOKENS,
    BlockCall,
    BlockFamily,
    Dims,
    LinearWeights,
    Statics,
    Tensors,
)
from onediff_ext.engine.quantization import EightBitLinears

# Values of the static "context", which is part of stored keys: in a call with a text KV cache, and
# in one with cross-attention's output.
_PROJECTED, _ATTENDED = "projected", "attended"


class TransformerBlocks(BlockFamily):
    """Self-attention, cross-attention ``attn2`` to a context, and a feed-forward network."""

    # Attention's output would need a pass of its own to become 8-bit, which takes longer than the
    # product saves.
    eight_bits: EightBitLinears | None = EightBitLinears(
        together=(("attn1.to_q", "attn1.to_k", "attn1.to_v"), ("attn2.to_k", "attn2.to_v")),
        exact=("to_out.0",),
    )
    prompt_layers = ("attn2.to_k", "attn2.to_v")

    @abstractmethod
    def call(
        self, block: Any, x: torch.Tensor, context: torch.Tensor | None, statics: Statics
    ) -> torch.Tensor:
        """Call the block's own method.

        Args:
            block: The host's module, or its copy that is traced.
            x: [B, N, D].
            context: [B, M, C] or None.
            statics: As `BlockCall.statics`, by name.

        Returns:
            [B, N, D].
        """

    def token_call(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None,
        ahead: bool,
        *statics: tuple[str, Hashable],
    ) -> BlockCall:
        """Return a call with tokens and perhaps a context, for `sort`.

        Args:
            x: [B, H*W, D].
            context: [B, 77n, C] or None.
            ahead: Whether the text KV cache may be computed ahead of the graph, since only the
                `prompt_layers` read the context.
            statics: Further statics.
        """
        named = (("context", context is not None), *statics)
        if context is None:
            return BlockCall((x,), (TOKENS,), named)
        return BlockCall((x, context), (TOKENS, CONTEXT), named, context if ahead else None)

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> torch.Tensor:
        x, *others = tensors
        if statics["context"] == _ATTENDED:
            (output,) = others
            with _returning(block.attn2, output):
                return self.call(block, x, output, statics)
        if statics["context"] != _PROJECTED:
            return self.call(block, x, others[0] if others else None, statics)
        keys, values = others
        with _returning(block.attn2.to_k, keys), _returning(block.attn2.to_v, values):
            return self.call(block, x, keys, statics)

    def text_kv(
        self, block: Any, prompt: torch.Tensor, merged: Mapping[str, LinearWeights] = NOTHING
    ) -> tuple[torch.Tensor, ...]:
        # keys and values [B, M, heads * width]
        return tuple(
            _linear(block.get_submodule(name), prompt, merged.get(name)).contiguous()
            for name in self.prompt_layers
        )

    def with_text_kv(self, call: BlockCall, text_kv: tuple[torch.Tensor, ...]) -> BlockCall:
        return _with(call, text_kv, CONTEXT, _PROJECTED)

    def with_attention(self, call: BlockCall, output: torch.Tensor) -> BlockCall:
        return _with(call, (output,), TOKENS, _ATTENDED)

    def widest(self, block: Any, call: BlockCall) -> int:  # noqa: ARG002
        return 8 * call.tensors[0].numel()  # GEGLU's projection: 2 x 4 x width


def _with(call: BlockCall, tensors: tuple[torch.Tensor, ...], dims: Dims, name: str) -> BlockCall:
    """Return a call with these tensors in place of the prompt."""
    others = tuple((key, value) for key, value in call.statics if key != "context")
    return BlockCall(
        (call.tensors[0], *tensors),
        (TOKENS, *(dims for _ in tensors)),
        (("context", name), *others),
    )


def _linear(layer: nn.Module, x: torch.Tensor, merged: LinearWeights | None) -> torch.Tensor:
    """Return a layer's output, computed with merged weights where there are any."""
    if merged is None:
        output: torch.Tensor = layer(x)
        return output
    return linear(x, *merged)


@contextmanager
def _returning(layer: nn.Module, output: torch.Tensor) -> Iterator[None]:
    """Make a layer return `output`, whatever its arguments."""
    before = vars(layer).get("forward")  # a copy that is traced may have one of ours
    vars(layer)["forward"] = partial(_given, output)
    try:
        yield
    finally:
        del vars(layer)["forward"]
        if before is not None:
            vars(layer)["forward"] = before


def _given(output: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return output
