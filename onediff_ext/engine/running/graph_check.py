"""Compares the graph of a block with eager: at its first run, and in spot checks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from onediff_ext.engine.blocks.block_kind import BlockKind, KindState
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.blocks.family import BlockCall, BlockFamily
from onediff_ext.engine.blocks.kind_registry import KindRegistry
from onediff_ext.engine.checking.compare_with_eager import (
    QUANTIZED_TOLERANCE,
    as_exact_as,
    compare_all,
    worst,
)
from onediff_ext.engine.export.exporter import BlockFunction
from onediff_ext.engine.graph_calls import is_observed
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)

# A relative error below this may be eager's own; one above is a wrong result.
_DOUBTFUL = 1e-2


class GraphCheck:
    """Decides by a comparison whether a kind's graph may be used.

    Args:
        family: The family of the kind's blocks.
        registry: Hears of rejected graphs.
    """

    def __init__(self, family: BlockFamily, registry: KindRegistry) -> None:
        self._family, self._registry = family, registry

    def with_own_inputs(self, call: BlockCall) -> BlockCall:
        """Return a call whose tensors eager does not write into, for `judge`.

        Args:
            call: A call as the graph took it. It is returned as it is, unless the family's forward
                writes into its inputs.
        """
        if not self._family.mutates_inputs:
            return call
        return replace(call, tensors=tuple(t.clone() for t in call.tensors))

    def judge(
        self,
        kind: BlockKind,
        graph_outputs: Sequence[torch.Tensor],
        eager: Any,
        call: BlockCall,
        weights: Sequence[torch.Tensor],
        tree: BlockTree | None,
    ) -> bool:
        """Compare the outputs of one call, and make the kind ready or failed.

        The kind stays as it is when eager's output is NaN, or when there is no memory for the
        comparison: a comparison that can wait must not cost the image.

        Args:
            kind: The kind whose graph ran.
            graph_outputs: [B, …] each.
            eager: What the block's own method returned; its tensors have the same shapes and dtypes
                if all is well.
            call: The call as the graph takes it.
            weights: The weights of the block, without 8-bit copies.
            tree: The block.

        Returns:
            False when memory ran out. A comparison that raises another error makes the kind failed.
        """
        assert tree is not None
        try:
            return self._judge(
                kind, graph_outputs, self._family.tensors_of(eager), call, weights, tree
            )
        except Exception as exc:
            if is_observed() or isinstance(exc, OutOfMemoryError):
                raise
            logger.warning("%s cannot be compared with eager", kind.label, exc_info=True)
            kind.fail(f"cannot be compared with eager: {type(exc).__name__}: {exc}")
            return True

    def _judge(
        self,
        kind: BlockKind,
        graph_outputs: Sequence[torch.Tensor],
        eager_outputs: Sequence[torch.Tensor],
        call: BlockCall,
        weights: Sequence[torch.Tensor],
        tree: BlockTree,
    ) -> bool:
        allowed = None if kind.quantization is None else QUANTIZED_TOLERANCE
        try:
            comparison = compare_all(graph_outputs, eager_outputs, allowed)
            if comparison.problem is not None and comparison.error < _DOUBTFUL:
                exact = self._exact(call, weights, tree)
                comparison = worst(map(as_exact_as, graph_outputs, eager_outputs, exact))
        except OutOfMemoryError:
            return False
        kind.comparison = comparison
        if comparison.problem is not None:
            kind.fail(comparison.problem)
            logger.warning("%s runs eager: its graph %s", kind.label, comparison.problem)
            self._registry.rejected(kind)
        elif comparison.decided:
            kind.state = KindState.READY
        return True

    def _exact(
        self, call: BlockCall, weights: Sequence[torch.Tensor], tree: BlockTree
    ) -> tuple[torch.Tensor, ...]:
        """Compute the block in float64."""
        block = tree.copy()
        self._family.prepare(block)
        function = BlockFunction(block, self._family, tree.names, dict(call.statics), None)
        with torch.no_grad():
            outputs: tuple[torch.Tensor, ...] = function(
                [w.detach().double() for w in weights],
                *(t.double() if t.is_floating_point() else t for t in call.tensors),
            )
        return outputs
