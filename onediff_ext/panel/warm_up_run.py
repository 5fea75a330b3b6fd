"""A panel host's warm-up: one at a time, in a thread of its own, and how the last one ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.panel.phrases import Phrases
from onediff_ext.panel.reasons import explain
from onediff_ext.session.warm_up_report import NEXT_PICTURE, WarmUpReport

logger = logging.getLogger(__name__)
_POLL_S = 0.3


class WarmUpRun:
    """Runs warm-ups.

    Attributes:
        line: The result of the last warm-up in one line of English; ``""`` before and within one.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()
        self.line = ""

    @property
    def is_running(self) -> bool:
        """Whether a warm-up runs, or waits for its turn."""
        return self._running.locked()

    def steps(self, work: Callable[[], WarmUpReport], words: Phrases) -> Iterator[str]:
        """Run a warm-up; it goes on when nobody asks for further steps.

        Args:
            work: Warms up.
            words: The language.

        Yields:
            ``""`` once it has started, ``""`` from time to time, and the result in the end.

        Raises:
            OneDiffError: A warm-up runs already, or `work` raised it.
        """
        if not self._running.acquire(blocking=False):
            raise OptionError("A warm-up is running already.", "Cancel it first.")
        self.line = ""
        ended: list[WarmUpReport | OneDiffError | str] = []

        def run() -> None:
            end: WarmUpReport | OneDiffError | str
            try:
                end = work()
            except OneDiffError as exc:
                end = exc
            except Exception as exc:  # a thread's errors would be lost
                logger.exception("The warm-up ended")
                end = f"failed: {str(exc) or type(exc).__name__}"
            ended.append(end)
            self.line = end.line() if isinstance(end, WarmUpReport) else str(end)
            self._running.release()

        thread = threading.Thread(target=run, name="onediff-warm-up", daemon=True)
        thread.start()
        yield ""
        while thread.is_alive():
            thread.join(_POLL_S)
            yield ""
        if isinstance(ended[0], OneDiffError):
            raise ended[0]
        yield ended[0] if isinstance(ended[0], str) else summary_text(ended[0], words)


def summary_text(report: WarmUpReport, words: Phrases) -> str:
    """Return the result of a warm-up in a few sentences.

    Args:
        report: The result.
        words: The language.
    """
    sentences = report.sentences(lambda why: explain(why, words).why)
    # What a cancel means for the next picture stands in the status.
    sentences = [one for one in sentences if one.template != NEXT_PICTURE]
    return " ".join(words.say(sentence.template, **sentence.values) for sentence in sentences)
