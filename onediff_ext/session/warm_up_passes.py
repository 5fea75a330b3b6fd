"""A warm-up in several passes, between which waiting pictures are drawn, and its cancellation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from onediff_ext.core.shapes import BatchShape
from onediff_ext.session.warm_up import WarmUp
from onediff_ext.session.warm_up_report import WarmUpReport

# Time for those who wait in the host's queue, before the next pass queues up behind them.
_LET_PASS_S = 0.5


class WarmUpControl:
    """Ends a warm-up from any thread, during a pass or while it waits for one."""

    def __init__(self) -> None:
        self._running: WarmUp | None = None
        self.is_cancelled = False

    def start(self) -> None:
        """Begin a warm-up that is not cancelled."""
        self.is_cancelled = False

    def cancel(self) -> bool:
        """End the warm-up.

        Returns:
            Whether a pass was running.
        """
        running, self.is_cancelled = self._running, True
        if running is not None:
            running.cancel()
        return running is not None

    def run(self, warm_up: WarmUp) -> WarmUpReport:
        """Run one pass; cancel it first when the warm-up was cancelled.

        Args:
            warm_up: The pass.

        Returns:
            The results of the pass.
        """
        self._running = warm_up
        try:
            if self.is_cancelled:
                warm_up.cancel()
            return warm_up.run()
        finally:
            self._running = None


def in_passes(
    shapes: Sequence[BatchShape],
    run: Callable[[list[BatchShape]], WarmUpReport | None],
    is_cancelled: Callable[[], bool],
) -> WarmUpReport | None:
    """Warm up some sizes, and let waiting pictures go first between passes.

    Args:
        shapes: All sizes.
        run: Waits for its turn among the host's jobs, and warms up the sizes that are left.
            Returns None when the host cannot do it.
        is_cancelled: Asked between passes.

    Returns:
        The combined results of all passes; None when the first pass returned None.
    """
    total: WarmUpReport | None = None
    left = list(dict.fromkeys(shapes))
    while left:
        report = run(left)
        if report is None:
            break
        total = report if total is None else total.followed_by(report)
        if not report.gave_way:
            break
        measured = {figures.shape for figures in total.sizes}
        left = [shape for shape in left if shape not in measured]
        time.sleep(_LET_PASS_S)
        if is_cancelled():
            total.cancelled = True
            break
    return total
