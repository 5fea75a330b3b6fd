"""What tells a block's kind from others, and the export of a block that still is of that kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from onediff_ext.core.errors import BlockGoneError
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily
from onediff_ext.engine.blocks.weight_slots import Layout, WrapperRule
from onediff_ext.engine.export.exporter import (
    Autocast,
    export_block,
    make_examples,
    outline_of,
    save_program,
)
from onediff_ext.engine.quantization import Quantization, outlines
from onediff_ext.engine.validity.python_code import PythonCode


def look_at(
    block: nn.Module,
    family: BlockFamily,
    rules: Sequence[WrapperRule],
    code: PythonCode | None = None,
) -> BlockTree:
    """What a block consists of now, as its family sees it."""
    return BlockTree(
        block,
        family.sources,
        rules,
        family.parts,
        family.ignored_attrs,
        family.dynamic_weight_attrs,
        family.trusted_patchers,
        code,
    )


@dataclass(frozen=True)
class BlockIdentity:
    """What a kind was named after, without the block."""

    names: tuple[str, ...]
    entries: Mapping[str, str]
    layouts: list[Layout]

    @classmethod
    def of(cls, tree: BlockTree) -> BlockIdentity:
        """Of a block as it is."""
        return cls(tree.names, tree.entries, tree.layouts())


def prepare_export(
    blocks: Iterable[nn.Module],
    identified: BlockIdentity,
    family: BlockFamily,
    rules: Sequence[WrapperRule],
    code: PythonCode,
    outline: BlockCall,
    autocast: Autocast,
    quantization: Quantization | None,
    device: torch.device,
) -> Callable[[], bytes]:
    """Ready everything for an export on a device, and return what does it.

    Raises:
        BlockGoneError: No living block is what its kind was named after.
    """
    # Any block of the kind serves: the first one may be of a model that is gone.
    gone = "The model is gone."
    for block in blocks:
        tree = look_at(block, family, rules, code)
        if tree.refusal_reason is None and tree.is_built_as(identified):  # type: ignore[arg-type]
            break
        gone = "The block has changed since its kind was named."
    else:
        raise BlockGoneError(gone)
    traced = tree.copy()
    family.prepare(traced)
    examples = make_examples(outline, device)
    # Those that the kind was named with: SDXL's VAE is float32 for its calls only.
    weights = [outline_of(layout, device) for layout in identified.layouts]
    if quantization is not None:
        weights = outlines(weights, quantization)

    def export() -> bytes:
        program = export_block(
            traced, family, tree.names, weights, outline, device, autocast, examples, quantization
        )
        return save_program(program)

    return export
