"""The text of a block in its kind's key. Stored graphs are found by it, so it must not change."""

from __future__ import annotations

from types import SimpleNamespace

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
    ],
)
def test_hyper_parameters(value: object, text: str) -> None:
    assert describe(value) == text


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
