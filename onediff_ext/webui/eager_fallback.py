"""Running a job eager after an error, and the reasons why the current job runs eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class EagerFallback:
    """Turns errors into reasons, so that a failure costs speed and never a picture.

    Args:
        detach: Removes all graphs from the host's models.

    Attributes:
        reasons: Why the current job runs eager, each once.
        of_picture: While the current job is a warm-up: why the last picture ran eager.
    """

    def __init__(self, detach: Callable[[], None]) -> None:
        self._detach = detach
        self.reasons: list[str] = []
        self.of_picture: list[str] = []
        self._is_warm_up = False
        self._reason_before_sampling: str | None = None

    def clear(self) -> None:
        """Forget the reasons of the job before: a picture begins."""
        self.reasons, self._reason_before_sampling = [], None
        self.of_picture, self._is_warm_up = [], False

    def begin_warm_up(self) -> None:
        """Keep the reasons of the last picture: a warm-up begins."""
        of_picture = self.of_picture if self._is_warm_up else self.reasons
        self.clear()
        self.of_picture, self._is_warm_up = of_picture, True

    def add(self, reason: str) -> None:
        """Record a reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            logger.info("Eager: %s", reason)

    def add_before_sampling(self, reason: str) -> None:
        """Record a reason found before sampling, which `clear_before_sampling` withdraws."""
        self.add(reason)
        self._reason_before_sampling = reason

    def clear_before_sampling(self) -> None:
        """Withdraw the reason found before sampling.

        It may belong to the job before: hosts clean up after that one when the next one begins.
        """
        if self._reason_before_sampling is not None:
            self.reasons.remove(self._reason_before_sampling)
            self._reason_before_sampling = None

    @contextmanager
    def on_failure(self) -> Iterator[None]:
        """Detach all models when the block raises. This is the one place that swallows errors."""
        try:
            yield
        except Exception as exc:
            self.add(f"failed: {str(exc) or type(exc).__name__}")
            logger.warning("This picture is drawn eager", exc_info=True)
            self._detach()
