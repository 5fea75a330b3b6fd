"""The text of a block in its kind's key. Stored graphs are found by it, so it must not change."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.key_text import describe


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": [1, None], "a": torch.float16}, "{a=torch.float16,b=(1,None)}"),
        (nn.ReLU, "torch.nn.modules.activation.ReLU"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (torch.nn.functional.silu, "torch.nn.functional.silu"),
        (SimpleNamespace(x=("s", 1.5)), "types.SimpleNamespace{x=('s',1.5)}"),
        (
            [torch.relu, torch.nn.functional.silu, abs, Fraction],
            "(torch._VariableFunctionsClass.relu,torch.nn.functional.silu,builtins.abs,fractions.Fraction)",
        ),
    ],
)
def test_hyper_parameters(value: object, text: str) -> None:
    assert describe(value) == text


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: object) -> None:
        self.scale = scale

    def scaled(self, number: float) -> float:
        return number * self.scale  # type: ignore[operator]


def scaled_by(scale: float) -> Callable[[float], float]:
    return lambda number: number * scale


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (np.float32(1.5), np.float32(0.7)),
        (np.int64(8), np.int64(4)),
        (np.float32(8), np.int64(8)),
        (Fraction(1, 3), Fraction(2, 3)),
        (1 + 2j, 1 + 3j),
        (b"a", b"b"),
        (range(3), range(4)),
        ({"a", "b"}, {"a", "c"}),
        (Slotted(1.5), Slotted(0.7)),
        ([Slotted((1,))], [Slotted((2,))]),
    ],
)
def test_values_of_one_class_have_texts_of_their_own(value: object, other: object) -> None:
    untold: list[str] = []
    assert describe(value, untold=untold) != describe(other, untold=untold)
    assert describe(value) == describe(copy.deepcopy(value))
    assert not untold


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ([torch.tensor(1.5)], ["torch.Tensor"]),
        (np.array([1.5]), ["numpy.ndarray"]),
        ({"a": deque([1])}, ["collections.deque"]),
        ([nn.Linear(1, 1)], ["torch.nn.modules.linear.Linear"]),
        ({"a": functools.partial(round, ndigits=1)}, ["functools.partial"]),
        ((1.5).__mul__, ["builtins.method-wrapper"]),
        (SimpleNamespace(a=Slotted(1).scaled), ["builtins.method"]),
        ((scaled_by(2),), ["builtins.function"]),
        ([{"a": 1}.get], ["builtins.builtin_function_or_method"]),
        (
            SimpleNamespace(a=SimpleNamespace(a=SimpleNamespace(a=SimpleNamespace(a=1)))),
            ["types.SimpleNamespace"],
        ),
    ],
)
def test_what_a_text_cannot_tell_has_no_graph(value: object, names: list[str]) -> None:
    untold: list[str] = []
    describe(value, untold=untold)
    assert untold == names
    block = nn.GroupNorm(32, 64)
    block.eps = value  # type: ignore[assignment]
    assert BlockTree(block, ()).refusal_reason == f"a GroupNorm holds a {names[0]} of unknown value"


def test_a_method_of_a_builtin_object_has_no_graph() -> None:
    """As an attribute of its own: its name says nothing of the object that it is bound to."""
    block = nn.GroupNorm(32, 64)
    block.eps = {"a": 1.0}.get  # type: ignore[assignment]
    reason = BlockTree(block, ()).refusal_reason
    assert reason == "the block holds a function of a builtin_function_or_method (eps)"


def test_the_entries_of_a_block() -> None:
    assert BlockTree(nn.GroupNorm(32, 64), ()).entries == {
        "block": "torch.nn.modules.normalization.GroupNorm",
        "hyper-parameters": "49a95ec693295b6e",
        "weights": "2a6bf18d3b015c6d",
        "weight dtype": "float32",
        "source": "e3b0c44298fc1c14",
    }


@pytest.mark.parametrize("change", [{"eps": 1e-3}, {"num_groups": 16}])
def test_another_hyper_parameter_is_another_entry(change: dict[str, object]) -> None:
    block = nn.GroupNorm(32, 64)
    vars(block).update(change)
    entries = BlockTree(block, ()).entries
    assert entries["hyper-parameters"] != "49a95ec693295b6e"
    assert entries["weights"] == "2a6bf18d3b015c6d"


def test_ignored_and_redundant_attributes_are_not_in_the_key() -> None:
    found = []
    block = nn.GroupNorm(32, 64)
    for eps, affine in ((1e-5, True), (1e-3, False)):
        block.eps, block.affine = eps, affine
        tree = BlockTree(
            block, (), ignored_attrs=frozenset({"eps"}), redundant_attrs=frozenset({"affine"})
        )
        found.append(tree.entries["hyper-parameters"])
    assert found[0] == found[1]
    assert BlockTree(block, ()).entries["hyper-parameters"] != "49a95ec693295b6e"


def test_attributes_that_no_code_reads_are_not_in_the_key() -> None:
    """Another extension's notes, and what it has left behind."""
    block = nn.GroupNorm(32, 64)
    block.layer_name, block.config_record = "diffusion_model_x", {"a": 1}
    assert BlockTree(block, ()).entries["hyper-parameters"] == "49a95ec693295b6e"
