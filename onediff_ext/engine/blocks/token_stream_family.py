"""The base of families of blocks of transformer models, on image tokens and perhaps text tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from onediff_ext.engine.blocks.argument_parts import (
    Form,
    Members,
    Part,
    put_together,
    take_apart,
)
from onediff_ext.engine.blocks.complex_pairs import RealArithmetic
from onediff_ext.engine.blocks.family import (
    UNKNOWN_ARGUMENTS,
    Arguments,
    BlockCall,
    BlockFamily,
    Dims,
    Refusal,
    Statics,
    Tensors,
)

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# The widest projection inside of a block, as a multiple of the tokens' width.
_WIDENING = 9  # Flux.2's query, key, value and the two halves of its SwiGLU


class TokenStreamBlocks(BlockFamily):
    """Blocks that change tokens, with tables and vectors beside them.

    A stream is the tokens of the image, of the text, or of both. Attention is over all streams.

    Attributes:
        streams: Names of the arguments that are tokens [B, N, D], the image's first.
        dims: Names of the dims of the other tensor arguments, by the argument's name, as
            `take_apart` takes them.
        outputs: Names of the streams that the block returns, in order. One alone is returned as
            it is, several as a tuple.
    """

    streams: Mapping[str, Dims]
    dims: Mapping[str, Dims | Members]
    outputs: tuple[str, ...]

    def eager_reason(self, block: Any, arguments: Arguments) -> str | None:  # noqa: ARG002
        """Return why a call with these arguments runs eager, or None.

        Args:
            block: The host's module.
            arguments: As `sort` takes them, before their forms are looked at.
        """
        return None

    def is_returned(self, block: Any, name: str) -> bool:  # noqa: ARG002
        """Return whether the block returns this one of its `outputs`, and not None for it.

        Args:
            block: The host's module.
            name: One of `outputs`.
        """
        return True

    def dims_of(self, block: Any) -> Mapping[str, Dims | Members]:  # noqa: ARG002
        """Return the `dims` of this block's arguments.

        Args:
            block: The host's module. Blocks of one class may take an argument in several forms.
        """
        return self.dims

    def sort(self, block: Any, arguments: Arguments) -> BlockCall | Refusal:
        reason = self.eager_reason(block, arguments)
        if reason is not None:
            return Refusal(reason)
        if any(not isinstance(arguments.get(name), torch.Tensor) for name in self.streams):
            return UNKNOWN_ARGUMENTS
        text = arguments[list(self.streams)[-1]].shape[1]  # not used without a text stream
        named = {**self.dims_of(block), **self.streams}
        forms: list[tuple[str, Form]] = []
        parts: list[Part] = []
        for name in dict.fromkeys((*self.streams, *self.arguments)):
            value = arguments.get(name)
            if value is None:
                continue
            dims = named.get(name)
            if dims is None:
                if value is False or (isinstance(value, Mapping) and not value):
                    continue
                return Refusal(f"called with {name}")
            found = take_apart(value, dims, text)
            if found is None:
                return Refusal(f"called with {name} of another form")
            forms.append((name, found[0]))
            parts += found[1]
        tensors, names = zip(*parts, strict=True)
        return BlockCall(tensors, names, (("arguments", tuple(forms)),))

    def run(self, block: Any, tensors: Tensors, statics: Statics) -> Any:
        given, forms = iter(tensors), statics["arguments"]
        arguments = {name: put_together(form, given) for name, form in forms}  # type: ignore[attr-defined]
        for name, parameter in inspect.signature(block.forward).parameters.items():
            if parameter.default is parameter.empty and parameter.kind not in _REST:
                arguments.setdefault(name, None)
        with RealArithmetic():
            return block.forward(**arguments)

    def tensors_of(self, output: Any) -> tuple[torch.Tensor, ...]:
        streams = output if isinstance(output, tuple) else (output,)
        # A part of a longer stream would be copied by the next block.
        return tuple(stream.contiguous() for stream in streams if stream is not None)

    def output_of(self, block: Any, tensors: Tensors) -> Any:
        given = iter(tensors)
        streams = tuple(next(given) if self.is_returned(block, n) else None for n in self.outputs)
        return streams if len(streams) > 1 else streams[0]

    def widest(self, block: Any, call: BlockCall) -> int:  # noqa: ARG002
        return _WIDENING * sum(tensor.numel() for tensor in call.tensors[: len(self.streams)])
