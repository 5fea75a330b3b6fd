"""The blocks of the transformer models (DiT) of Forge and Neo: Flux and its relatives.

A class whose ``forward`` has other arguments than those named here, as in another version of the
host, has no family, so it runs eager.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from onediff_ext.engine.blocks.argument_parts import JOINT, Members
from onediff_ext.engine.blocks.family import (
    CONTEXT,
    TOKENS,
    VECTOR,
    Arguments,
    BlockCall,
    BlockFamily,
    Dims,
    Refusal,
    Statics,
    Tensors,
)
from onediff_ext.engine.blocks.token_stream_family import TokenStreamBlocks
from onediff_ext.engine.quantization import EightBitLinears
from onediff_ext.hosts.forge_attention import EXACT, AttentionRules, inexact_reason
from onediff_ext.hosts.forge_blocks import ForgeBlocks, ForgePackage
from onediff_ext.hosts.rebound_functions import rebind_forwards

# A RoPE table has a 2x2 matrix for each pair of channels: [B, 1, N, D/2, 2, 2].
_TABLE: Dims = ("batch", None, "tokens", None, None, None)
_JOINT_TABLE: Dims = ("batch", None, JOINT, None, None, None)
# A modulation that is computed ahead of the blocks: vectors [B, 1, D].
_VECTORS: Dims = ("batch", None, None)

_ATTENTION = "backend.attention"


class ForgeTokenBlocks(TokenStreamBlocks, ForgeBlocks):
    """Blocks on tokens of a class that a Python module of the host has.

    Args:
        package: The host's.
        attention: How the host computes attention in its UNets.

    Attributes:
        home: The Python module of the class.
        attends_in: The Python module whose global ``attention_function`` such a block calls; empty
            for blocks that call PyTorch's kernel themselves.
        signature: Names of the arguments of the class's forward; empty for `arguments`.
        neglected: Names of arguments that change nothing in the block.
        functions: Globals of the blocks' Python modules that a graph has others for.
    """

    home: str
    attends_in: str = "backend.nn.flux"
    signature: tuple[str, ...] = ()
    neglected: tuple[str, ...] = ()
    functions: Mapping[str, Any] = {}

    def __init__(self, package: ForgePackage, attention: AttentionRules) -> None:
        super().__init__(package, attention)
        homes = dict.fromkeys((self.home, self.attends_in or self.home))
        self.sources = (*(f"{module}." for module in homes), *package.layers)

    def module_name(self) -> str:
        return self.home

    def block_class(self) -> type[nn.Module] | None:
        found: Any = super().block_class()
        expected = self.signature or self.arguments
        return found if found is not None and _arguments_of(found) == expected else None

    def describe(self, block: Any) -> str:
        first = next(p for p in block.parameters() if p.ndim == 2)
        return f"{self.label} {first.shape[-1]}"

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:  # noqa: ARG002
        if not self.attends_in:
            return None
        chosen = getattr(sys.modules[self.attends_in], "attention_function", None)
        return inexact_reason(chosen, sys.modules[_ATTENTION], EXACT, self.attention.advice)

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        kept = {name: v for name, v in arguments.items() if name not in self.neglected}
        call = super().sort(block, kept)
        if isinstance(call, Refusal):
            return call
        dtype = call.tensors[0].dtype
        upcast = dtype != torch.float32 and self.attention.upcasts(None, dtype)
        return BlockCall(call.tensors, call.dims, (*call.statics, ("upcast", upcast)))

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> Any:
        attention = partial(_attend_heads, upcast=bool(statics["upcast"]))
        functions = {
            "attention_function": attention,
            "apply_rope": _apply_rope,
            **self.functions,
        }
        rebind_forwards(block, "backend.nn.", functions)
        for module in block.modules():
            if isinstance(getattr(module, "scale", None), nn.Parameter):
                module.forward = partial(_scaled_rms_norm, module)
        streams = tensors[: len(self.streams)]
        if self.mutates_inputs:
            streams = tuple(stream.clone() for stream in streams)
        return super().run(block, (*streams, *tensors[len(streams) :]), statics)


class _FluxBlocks(ForgeTokenBlocks):
    """Flux's two kinds of block. A vector [B, D] is modulated by each block itself.

    Blocks without a modulation of their own take its result: those of Chroma, and of Flux.2.
    """

    home = "backend.nn.flux"
    modulation: str = "vec"
    table: Dims = _TABLE

    def dims_of(self, block: Any) -> Mapping[str, Dims | Members]:
        is_ready = self.modulation == "mod" or not getattr(block, "modulation", True)
        return {self.modulation: _VECTORS if is_ready else VECTOR, "pe": self.table}


class FluxDouble(_FluxBlocks):
    """Forge's block with two streams."""

    class_name = "DoubleStreamBlock"
    arguments: tuple[str, ...] = ("img", "txt", "vec", "pe")
    streams: Mapping[str, Dims] = {"img": TOKENS, "txt": CONTEXT}
    outputs = ("img", "txt")
    table = _JOINT_TABLE
    eight_bits = EightBitLinears(exact=("img_mod.lin", "txt_mod.lin"))


class FluxSingle(_FluxBlocks):
    """Forge's block on the tokens of text and image."""

    class_name = "SingleStreamBlock"
    arguments: tuple[str, ...] = ("x", "vec", "pe")
    streams: Mapping[str, Dims] = {"x": TOKENS}
    outputs = ("x",)
    eight_bits = EightBitLinears(exact=("modulation.lin",))


class ChromaDouble(FluxDouble):
    """Forge's block with two streams for Chroma."""

    home = "backend.nn.chroma"
    arguments = ("img", "txt", "mod", "pe")
    modulation = "mod"


class ChromaSingle(FluxSingle):
    """Forge's block on the tokens of text and image for Chroma."""

    home = "backend.nn.chroma"
    arguments = ("x", "mod", "pe")
    modulation = "mod"


class JointBlock(ForgeTokenBlocks):
    """Forge's block of SD3 and SD3.5. The last one of a model returns no text."""

    home = "backend.nn.mmditx"
    attends_in = ""
    class_name = "JointBlock"
    arguments = ("context", "x", "c")
    signature = ("args", "kwargs")
    streams: Mapping[str, Dims] = {"x": TOKENS, "context": CONTEXT}
    dims: Mapping[str, Dims | Members] = {"c": VECTOR}
    outputs = ("context", "x")
    eight_bits = EightBitLinears(exact=("adaLN_modulation.1",))

    def is_returned(self, block: Any, name: str) -> bool:
        return name == "x" or not block.context_block.pre_only


FORGE_TOKEN_BLOCKS: tuple[type[ForgeTokenBlocks], ...] = (
    FluxDouble,
    FluxSingle,
    ChromaDouble,
    ChromaSingle,
    JointBlock,
)


def token_families(
    blocks: Sequence[type[ForgeTokenBlocks]], package: ForgePackage, attention: AttentionRules
) -> tuple[BlockFamily, ...]:
    """The families of one host's transformer models.

    Args:
        blocks: Its families.
        package: The host's.
        attention: How the host computes attention in its UNets.
    """
    return tuple(family(package, attention) for family in blocks)


def _arguments_of(cls: Any) -> tuple[str, ...]:
    """Names of the arguments of a class's forward."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _attend_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: object = None,
    skip_reshape: bool = False,
    transformer_options: object = None,  # noqa: ARG001
    *,
    upcast: bool = False,
) -> torch.Tensor:
    """Attention as the hosts' functions compute it, by PyTorch's kernel.

    Args:
        q, k, v: [B, heads, N, D] with `skip_reshape`, else [B, N, heads * D].
        heads: Number of heads.
        mask: Unknown here.
        attn_precision: Unknown here.
        skip_reshape: See `q`.
        transformer_options: Changes nothing.
        upcast: Compute in float32.

    Returns:
        [B, N, heads * D].

    Raises:
        NotImplementedError: There is a mask or a precision.
    """
    if mask is not None or attn_precision is not None:
        raise NotImplementedError("attention with a mask or a precision of its own")
    if not skip_reshape:
        q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(1, 2) for t in (q, k, v))
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    return scaled_dot_product_attention(q, k, v).to(dtype).transpose(1, 2).flatten(2)


def _apply_rope(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs of channels, in the dtype of the table.

    Args:
        q, k: [..., D].
        table: A 2x2 matrix for each pair, [..., D/2, 2, 2].

    Returns:
        q and k.
    """
    return _rotate(q, table), _rotate(k, table)


def apply_rope_split_half(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs of a channel of the first half and one of the second, as comfy_kitchen does.

    Args:
        q, k: [..., D].
        table: A 2x2 matrix for each pair, [..., D/2, 2, 2].

    Returns:
        q and k.
    """
    return _rotate_halves(q, table), _rotate_halves(k, table)


def _rotate_halves(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first, second = (half.unsqueeze(-1) for half in x.to(table.dtype).chunk(2, -1))
    return _turned(first, second, table).transpose(-1, -2).flatten(-2).type_as(x)


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first, second = x.to(table.dtype).reshape(*x.shape[:-1], -1, 1, 2).unbind(-1)
    return _turned(first, second, table).flatten(-2).type_as(x)


def _turned(first: torch.Tensor, second: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    # first, second [..., D/2, 1], table [..., D/2, 2, 2] → [..., D/2, 2]
    return table[..., 0] * first + table[..., 1] * second


def _scaled_rms_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute an RMSNorm whose weight is its ``scale``.

    The host's own replaces the weight by one of the input's dtype at the first call.
    """
    return rms_norm(x, (x.shape[-1],), norm.scale.to(x.dtype), norm.eps)
