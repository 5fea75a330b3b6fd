"""Estimates what graphs save, which tells whether a picture should wait for them."""

from __future__ import annotations

from collections.abc import Iterable

from onediff_ext.engine.blocks.block_kind import BlockKind, KindState

# Until it was measured: 31 graphs of Stable Diffusion 1.5 on an H100.
USUAL_LOAD_S = 3.0
# What graphs save, as a share of the steps' time without them and with them. An estimate.
_SAVED_OF_EAGER, _SAVED_OF_COMPILED = 0.55, 1.2


def saved_by_graphs_s(kinds: Iterable[BlockKind], steps_s: float) -> float:
    """Estimate what graphs save in a picture like the last one.

    Args:
        kinds: Those of its blocks; failed ones do not count.
        steps_s: Seconds of its steps (`PictureTimer.steps_s`).

    Returns:
        Seconds; 0 where nothing is known.
    """
    served = {
        kind.state is KindState.READY  # new ones serve the next picture
        for kind in kinds
        if kind.state is not KindState.FAILED
    }
    if len(served) != 1:
        return 0.0
    return round((_SAVED_OF_COMPILED if served == {True} else _SAVED_OF_EAGER) * steps_s, 3)
