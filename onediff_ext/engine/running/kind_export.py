"""Exports a kind from any of its living blocks, without keeping a block alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from onediff_ext.core.errors import BlockGoneError
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily
from onediff_ext.engine.blocks.weight_form import Layout
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.export.exporter import (
    Autocast,
    export_block,
    make_examples,
    outline_of,
    save_program,
)
from onediff_ext.engine.quantization import Quantization, outlines
from onediff_ext.engine.validity.python_code import PythonCode


@dataclass(frozen=True)
class KindExport:
    """All that an export of a kind needs, except a block.

    Args:
        family: The family of the kind's blocks.
        rules: Wrappers around layers.
        code: Watches the code of this process.
        names: Names of the weights.
        entries: The part of the key that the block decided.
        layouts: Layouts of the weights when the key was made. A weight's dtype may change between
            calls: SDXL's VAE is float32 only while it runs.
        call: A call as the graph takes it, with tensors on the meta device.
        autocast: Of that call.
        quantization: Which weights are 8-bit copies; None for none.
    """

    family: BlockFamily
    rules: Sequence[WrapperRule]
    code: PythonCode
    names: tuple[str, ...]
    entries: Mapping[str, str]
    layouts: list[Layout]
    call: BlockCall
    autocast: Autocast
    quantization: Quantization | None

    def prepare(self, blocks: Iterable[nn.Module], device: torch.device) -> Callable[[], bytes]:
        """Copy a living block of the kind, and return the function that exports the copy.

        Args:
            blocks: The kind's living blocks. The first ones may belong to a model that changed.
            device: Where the copy is traced.

        Returns:
            Returns the serialised program, and raises `ExportError`. Any thread may call it.

        Raises:
            BlockGoneError: No living block is what the key was made from.
        """
        tree = self._find(blocks)
        traced = tree.copy()
        self.family.prepare(traced)
        examples = make_examples(self.call, device)
        weights = [outline_of(layout, device) for layout in self.layouts]
        if self.quantization is not None:
            weights = outlines(weights, self.quantization)

        def export() -> bytes:
            program = export_block(
                traced, self.family, self.names, weights, self.call, device, self.autocast,
                examples, self.quantization,
            )  # fmt: skip
            return save_program(program)

        return export

    def _find(self, blocks: Iterable[nn.Module]) -> BlockTree:
        gone = "The model is gone."
        for block in blocks:
            tree = BlockTree.of(block, self.family, self.rules, self.code)
            if tree.refusal_reason is None and tree.is_built_as(self.names, self.entries):
                return tree
            gone = "The block has changed since its kind was named."
        raise BlockGoneError(gone)
