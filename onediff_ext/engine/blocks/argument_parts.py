"""Arguments that are more than one tensor, taken apart for a graph and put together inside of it.

A graph takes plain real tensors in which each dim that varies is a symbol of its own. A RoPE table
(cos, sin) over text and image is two tensors whose length is the sum of two symbols; it becomes
four. A complex table becomes a real one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from onediff_ext.engine.blocks.complex_pairs import ComplexPair
from onediff_ext.engine.blocks.family import Dims

# The names of a dim of text tokens, then image tokens, and of one that has the batch twice.
JOINT = "joint"
TWICE = "twice"


class Members(NamedTuple):
    """Names of the dims of each member of a tuple."""

    dims: tuple[Dims, ...]


class Part(NamedTuple):
    """One tensor of an argument, and the names of its dims."""

    tensor: torch.Tensor
    dims: Dims


class Form(NamedTuple):
    """How an argument is put together again; part of stored keys by its text.

    Args:
        kind: ``"tensor"``, ``"complex"``, ``"joint"``, ``"twice"``, ``"tuple"`` or ``"record"``.
        axis: Of the dim that is cut.
        members: Forms of the members of a tuple or record, or of the one thing that is cut.
        names: Of the members of a record.
    """

    kind: str
    axis: int = 0
    members: tuple[Form, ...] = ()
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if self.kind == "tuple":
            return f"({', '.join(map(repr, self.members))})"
        if self.kind == "record":
            named = zip(self.names, self.members, strict=True)
            return f"({', '.join(f'{name}={form!r}' for name, form in named)})"
        return f"{self.kind} {self.axis} {self.members[0]!r}" if self.members else self.kind


_TENSOR, _COMPLEX = Form("tensor"), Form("complex")


def take_apart(value: Any, dims: Dims | Members, text: int) -> tuple[Form, list[Part]] | None:
    """Take an argument apart.

    Args:
        value: A tensor, or a tuple, list or dataclass of such values.
        dims: Names of the dims of each tensor, which are those of all members of a tuple unless
            they are `Members`. One may be `JOINT` or `TWICE`.
        text: Number of text tokens.

    Returns:
        The form, and the tensors; None for anything else, or tensors with other dims.
    """
    if isinstance(value, (tuple, list)):
        each = dims.dims if isinstance(dims, Members) else (dims,) * len(value)
        if len(each) != len(value):
            return None
        found = [take_apart(*member, text) for member in zip(value, each, strict=True)]
        members = [member for member in found if member is not None]
        if not found or len(members) < len(found):
            return None
        form = Form("tuple", 0, tuple(form for form, _ in members))
        return form, [part for _, parts in members for part in parts]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        found_record = take_apart(tuple(getattr(value, name) for name in names), dims, text)
        if found_record is None:
            return None
        return found_record[0]._replace(kind="record", names=names), found_record[1]
    if isinstance(dims, Members) or not isinstance(value, torch.Tensor) or value.ndim != len(dims):
        return None
    form = _TENSOR
    if value.is_complex():
        form, value = _COMPLEX, torch.view_as_real(value).flatten(-2)  # [..., D] → [..., 2D]
    if TWICE in dims:
        axis = dims.index(TWICE)
        if value.shape[axis] % 2:
            return None
        named = _named(dims, "batch")
        halves = [Part(half, named) for half in value.chunk(2, axis)]
        return Form("twice", axis, (form,)), halves
    if JOINT not in dims:
        return form, [Part(value, dims)]
    axis = dims.index(JOINT)
    image = value.shape[axis] - text
    if image < 0:
        return None
    return Form("joint", axis, (form,)), [
        Part(value.narrow(axis, 0, text), _named(dims, "context")),
        Part(value.narrow(axis, text, image), _named(dims, "tokens")),
    ]


def put_together(form: Form, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the argument that `take_apart` took apart.

    Args:
        form: From `take_apart`.
        tensors: Its tensors, in order; those of this argument are consumed.

    Returns:
        The argument. In place of a complex tensor it has a `ComplexPair`, in place of a dataclass
        a namespace with the same attributes.
    """
    if form.kind in ("tuple", "record"):
        members = tuple(put_together(member, tensors) for member in form.members)
        if form.kind == "tuple":
            return members
        return SimpleNamespace(**dict(zip(form.names, members, strict=True)))
    if form.kind not in (JOINT, TWICE):
        return _whole(form, next(tensors))
    first, second = next(tensors), next(tensors)
    return _whole(form.members[0], torch.cat([first, second], form.axis))


def _whole(form: Form, tensor: torch.Tensor) -> Any:
    if form.kind == "complex":
        return ComplexPair(tensor.reshape(*tensor.shape[:-1], -1, 2))
    return tensor


def _named(dims: Dims, name: str) -> Dims:
    return tuple(name if dim in (JOINT, TWICE) else dim for dim in dims)
