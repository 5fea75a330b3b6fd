"""Finds the kind of a block's call: the key's entries, and a new kind when there is none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from onediff_ext.core.kind_key import KindKey
from onediff_ext.engine.blocks.block_kind import BlockKind, LiveBlocks
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily
from onediff_ext.engine.blocks.key_text import digest, source_digest
from onediff_ext.engine.blocks.kind_registry import KindRegistry
from onediff_ext.engine.export.exporter import Autocast
from onediff_ext.engine.quantization import PRECISIONS, Quantization, plan, unavailable_reason
from onediff_ext.engine.running.call_signature import input_text, work
from onediff_ext.engine.running.kind_export import KindExport
from onediff_ext.engine.validity.helper_functions import modules_named_by


def find_kind(
    registry: KindRegistry,
    family: BlockFamily,
    block: nn.Module,
    tree: BlockTree,
    weights: Sequence[torch.Tensor],
    call: BlockCall,
    autocast: Autocast,
    ahead: Sequence[str],
    precision: str,
) -> BlockKind:
    """Return the kind of a call, and add the block to the kind's living blocks.

    Args:
        registry: Holds the kinds of this process.
        family: The family of the block.
        block: The host's module.
        tree: The block as it is now.
        weights: The weights of `tree`.
        call: The call as its graph takes it.
        autocast: Of the call.
        ahead: Names of the layers that run ahead of the graph.
        precision: From `precision_of`.
    """
    device = call.tensors[0].device
    quantization = _quantization(registry, family, tree, weights, device, ahead, precision)
    key = KindKey(
        {
            **tree.entries,
            **(family.packages() or _helpers_entry(block)),
            **registry.key_entries(device),
            "inputs": "; ".join(
                input_text(t, dims) for t, dims in zip(call.tensors, call.dims, strict=True)
            ),
            "call": repr(call.statics),
            "autocast": "off" if autocast is None else str(autocast[1]),
            **({} if quantization is None else {"precision": quantization.key_entry}),
        }
    )

    def make() -> BlockKind:
        label, blocks = family.describe(block), LiveBlocks()
        if quantization is not None:
            label = f"{label} {quantization.precision}"
        # The kind outlives the block: it keeps no weight, and of the call only its outline.
        outline = BlockCall(
            tuple(torch.empty_like(t, device="meta") for t in call.tensors),
            call.dims,
            call.statics,
        )
        export = KindExport(
            family, registry.rules, registry.code, tree.names, tree.entries, tree.layouts(),
            outline, autocast, quantization,
        )  # fmt: skip
        return BlockKind(
            key,
            label,
            device,
            lambda on: export.prepare(blocks, on),
            quantization,
            work(call, weights),
            blocks=blocks,
        )

    kind = registry.find(key, device, make)
    kind.blocks.add(block)
    return kind


def _quantization(
    registry: KindRegistry,
    family: BlockFamily,
    tree: BlockTree,
    weights: Sequence[torch.Tensor],
    device: torch.device,
    ahead: Sequence[str],
    precision: str,
) -> Quantization | None:
    """Plan the 8-bit copies for a precision; None for none."""
    if family.eight_bits is None or precision not in PRECISIONS:
        return None
    reason = unavailable_reason(precision, device)
    if reason is not None:
        registry.fell_back(f"the {precision} precision", reason)
        return None
    return plan(tree.names, weights, precision, family.eight_bits, ahead)


def _helpers_entry(block: nn.Module) -> dict[str, str]:
    """The source of what a block's classes call, for a host whose package has no version."""
    classes = {type(module) for module in block.modules()}
    names = sorted(set().union(*map(modules_named_by, classes)))
    return {"helpers": digest(" ".join(map(source_digest, names)))} if names else {}
