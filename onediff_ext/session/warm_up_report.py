"""The progress and the results of a warm-up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onediff_ext.core.shapes import BatchShape
from onediff_ext.core.words import times_faster

STAGES = ("kinds", "captures", "measuring")

# What a warm-up says at its end, as sentences that the panel translates.
READY, READY_ONE = "Ready: {n} sizes.", "Ready: 1 size."
CANCELLED = "Cancelled."
UNFINISHED = "The warm-up ended early. Sizes that are ready: {n}."
ALL_BUILT, BUILT = "All {n} graphs are built.", "Graphs built: {n}."
ALL_THERE, THERE = "All {n} graphs were there already.", "Graphs that were there already: {n}."
BUILT_AND_THERE = "Graphs built: {built}; {n} were there already."
FAILED = "Graphs that could not be built: {n} ({why})."
NEXT_PICTURE = "The next picture has its missing graphs built."
GAIN = "A step is {times}x as fast as without."
GAINS = "A step is faster than without: {times}."
NO_GAIN, NO_GAIN_HERE = "Graphs bring no gain at these sizes.", "Graphs bring no gain at this size."
TEMPLATES = (
    *(READY, READY_ONE, CANCELLED, UNFINISHED, ALL_BUILT, BUILT, ALL_THERE, THERE),
    *(BUILT_AND_THERE, FAILED, NEXT_PICTURE, GAIN, GAINS, NO_GAIN, NO_GAIN_HERE),
)
"""Every sentence above, for their translation."""


@dataclass(frozen=True)
class Sentence:
    """A sentence with its values.

    Args:
        template: One of `TEMPLATES`.
        values: By the names in the template.
    """

    template: str
    values: Mapping[str, object] = field(default_factory=dict)

    def english(self) -> str:
        """Return the sentence, untranslated."""
        return self.template.format(**self.values)


@dataclass(frozen=True)
class WarmUpProgress:
    """The progress of a warm-up.

    Args:
        stage: One of `STAGES`.
        done, needed: Kinds in the first stage, sizes in the others.
        label: The present kinds or size, or the last ones.
        seconds_left: Until the end of this stage; None when unknown.
    """

    stage: str
    done: int
    needed: int
    label: str
    seconds_left: float | None


@dataclass(frozen=True)
class SizeFigures:
    """The measurements at one size.

    Args:
        shape: Size in pixels and pictures at once. CFG doubles the UNet's batch.
        first_s: Seconds of the first step at this size.
        eager_ms, compiled_ms: Milliseconds of one step, the shortest of several.
    """

    shape: BatchShape
    first_s: float
    eager_ms: float
    compiled_ms: float

    @property
    def speedup(self) -> float:
        """Eager time over compiled time."""
        return self.eager_ms / self.compiled_ms

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "size": str(self.shape),
            "first_s": self.first_s,
            "eager_ms": self.eager_ms,
            "compiled_ms": self.compiled_ms,
            "speedup": self.speedup,
        }


@dataclass
class WarmUpReport:
    """The results of a warm-up.

    Args:
        sizes: Measurements in the order of the sizes; incomplete when the warm-up ended early.
        built: Kinds whose graph this warm-up has built.
        loaded: Kinds whose graph was there already: stored, or in use before.
        built_before: Kinds whose graph this process had built before.
        eager: Kinds that stay eager.
        why_eager: The eager reason of most of them, or ``""``.
        cancelled: Whether somebody ended it early.
        gave_way: Whether it ended early since somebody wanted a picture.
        seconds: Of the whole warm-up.
    """

    sizes: list[SizeFigures] = field(default_factory=list)
    built: int = 0
    loaded: int = 0
    built_before: int = 0
    eager: int = 0
    why_eager: str = ""
    cancelled: bool = False
    gave_way: bool = False
    seconds: float = 0.0

    def followed_by(self, later: WarmUpReport) -> WarmUpReport:
        """Combine this pass with a later one over the sizes that were left.

        What was built between the two counts too: builds go on while waiting pictures are drawn.

        Args:
            later: The report of the later pass.

        Returns:
            A report of both passes; `cancelled` and `gave_way` are those of the later one.
        """
        built = later.built_before + later.built - self.built_before
        return replace(
            later,
            sizes=self.sizes + later.sizes,
            built=built,
            built_before=self.built_before,
            loaded=max(0, later.built + later.loaded - built),
            eager=max(self.eager, later.eager),
            why_eager=later.why_eager or self.why_eager,
            seconds=self.seconds + later.seconds,
        )

    @property
    def speedup(self) -> float | None:
        """The geometric mean over all sizes; None when nothing was measured."""
        return statistics.geometric_mean(s.speedup for s in self.sizes) if self.sizes else None

    def sentences(self, put: Callable[[str], str] = lambda why: why) -> list[Sentence]:
        """Return the result in short sentences, to be translated and filled in.

        Args:
            put: Puts an eager reason in other words.
        """
        done, ready = len(self.sizes), self.built + self.loaded
        if self.cancelled:
            sentences = [Sentence(CANCELLED)]
        elif self.gave_way:
            sentences = [Sentence(UNFINISHED, {"n": done})]
        else:
            sentences = [Sentence(READY_ONE if done == 1 else READY, {"n": done})]
        is_whole = ready > 1 and not (self.cancelled or self.gave_way or self.eager)
        if self.built and self.loaded:
            sentences.append(Sentence(BUILT_AND_THERE, {"built": self.built, "n": self.loaded}))
        elif self.built:
            sentences.append(Sentence(ALL_BUILT if is_whole else BUILT, {"n": ready}))
        elif self.loaded:
            sentences.append(Sentence(ALL_THERE if is_whole else THERE, {"n": ready}))
        if self.eager:
            sentences.append(Sentence(FAILED, {"n": self.eager, "why": put(self.why_eager)}))
        if self.cancelled:
            sentences.append(Sentence(NEXT_PICTURE))
        elif self.sizes:
            sentences.append(self._gain())
        return sentences

    def _gain(self) -> Sentence:
        """What was gained; each size has a figure of its own, as in the header and the table."""
        times = {str(figures.shape): times_faster(figures.speedup) for figures in self.sizes}
        gains = {size: text for size, text in times.items() if text is not None}
        if not gains:
            return Sentence(NO_GAIN_HERE if len(self.sizes) == 1 else NO_GAIN)
        if len(times) == 1:
            return Sentence(GAIN, {"times": next(iter(gains.values()))})
        # A size without a gain is told as 1x: the table says "no gain" there.
        shown = (f"{size} {gains.get(size, '1')}x" for size in times)
        return Sentence(GAINS, {"times": ", ".join(shown)})

    def line(self) -> str:
        """Return all sentences in English, in one line."""
        return " ".join(sentence.english() for sentence in self.sentences())

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "sizes": [figures.as_json() for figures in self.sizes],
            "built": self.built,
            "loaded": self.loaded,
            "eager": self.eager,
            "cancelled": self.cancelled,
            "seconds": self.seconds,
            "speedup": self.speedup,
            "line": self.line(),
        }


WarmUpListener = Callable[[WarmUpProgress], None]
