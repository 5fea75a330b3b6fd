"""The state of a session for panel, API and command line: what runs, and what is being built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from onediff_ext.core.words import duration, times_faster

STATUS_SCHEMA = 2  # 2: "compiled in part", blocks, `substituted`

COMPILED_IN_PART = "compiled in part"


@dataclass(frozen=True)
class Status:
    """The state of one session at one moment.

    Args:
        running: How the next picture is drawn: ``"off"``, ``"eager"``, ``"captured"``
            (eager, replayed as a CUDA graph), ``"compiled"`` (every block through its graph), or
            ``"compiled in part"``.
        kinds_ready: Kinds of the current checkpoint whose graph is in use.
        kinds_failed: Kinds that stay eager for good.
        kinds_needed: Kinds of the current checkpoint that have been seen so far.
        building: Whether graphs are being built now.
        seconds_left: Estimate for this build from this machine's history; None when unknown.
        first_graph_s: While `seconds_left` is unknown, what the first graph takes on an idle
            machine, from builds of other machines; None without a figure, or when that is over.
        building_s: How long this build has gone on; None without one.
        stage: Stage of the build: ``""``, ``"reading"``, ``"exporting"``, ``"building"``,
            ``"proving"`` (the load check: a worker process runs an imported graph once), or of a
            warm-up: ``"kinds"``, ``"captures"``, ``"measuring"``.
        sizes_done, sizes_needed: Sizes of a warm-up in its current stage; 0 without a warm-up.
        warming_up: Whether a warm-up runs, or waits for its turn.
        building_now: Labels of the kinds that workers are building.
        waiting: Missing kinds that are not being built: cancelled, or builds are not allowed.
        cancelled: Whether the user cancelled builds of kinds that are still missing. The next
            picture that needs them has them built.
        paused: Whether the user paused builds; none starts until the user presses Go on.
        tuned, to_tune: Finished and wanted graphs of what is tuned now, while the machine is idle;
            0 when nothing is.
        tuning_gain: How much faster tuning has made the blocks of the current checkpoint, 0.04
            for 4%; None when it has not.
        captures: CUDA graphs in memory.
        speedup: Measured eager time over compiled time of one step, at the last picture's
            size; before the first picture, at all measured sizes; None when not measured.
        pays_off_after: Pictures after which the builds of this checkpoint's kinds have saved as
            much time as they took; None when not measured, or when graphs save nothing.
        problem: Why builds do not proceed (full disk, a worker that died), or ``""``.
        deepcache: What DeepCache did for the last picture, or why it did nothing; ``""`` when it
            was not requested.
        guidance: What guidance steps did for the last picture, likewise.
        reasons: Eager reasons, most frequent first.
        blocks_compiled: Blocks of the last picture that ran through their graph.
        blocks_needed: Blocks of the last picture; 0 before the first one.
        eager_blocks: Eager reasons of the other blocks, as (reason, blocks), most blocks first.
        substituted: Why a backend or precision differs from the requested one, or ``""``.
        backend: The backend whose graphs are used; ``""`` without a session.
        changed_by: Extensions that changed the model, as (eager reason, extension).
        first_builds_s: Estimate of this build as a whole, which seldom changes; None while nothing
            is built, or when unknown.
        picture_s: Seconds of the last picture; None before the first.
        without_s: Estimate of the same without OneDiff; None when its size was not measured.
        size_is_measured: Whether a warm-up has measured the last picture's sizes.
        other_pace: Whether the last picture's steps were much slower or faster than those measured.
        saved_s: Seconds that graphs have saved on this machine with this checkpoint, over all
            pictures of measured sizes; None without one.
        saved_since: When the first of them was drawn, in seconds since the epoch.
        notes: Choices of the last picture that were ignored, and why.
    """

    running: str = "off"
    kinds_ready: int = 0
    kinds_failed: int = 0
    kinds_needed: int = 0
    building: bool = False
    seconds_left: float | None = None
    first_graph_s: float | None = None
    building_s: float | None = None
    stage: str = ""
    sizes_done: int = 0
    sizes_needed: int = 0
    warming_up: bool = False
    building_now: tuple[str, ...] = ()
    waiting: int = 0
    cancelled: bool = False
    paused: bool = False
    tuned: int = 0
    to_tune: int = 0
    tuning_gain: float | None = None
    captures: int = 0
    speedup: float | None = None
    pays_off_after: int | None = None
    problem: str = ""
    deepcache: str = ""
    guidance: str = ""
    reasons: tuple[str, ...] = ()
    blocks_compiled: int = 0
    blocks_needed: int = 0
    eager_blocks: tuple[tuple[str, int], ...] = ()
    substituted: str = ""
    backend: str = ""
    changed_by: tuple[tuple[str, str], ...] = ()
    first_builds_s: float | None = None
    picture_s: float | None = None
    without_s: float | None = None
    size_is_measured: bool = False
    other_pace: bool = False
    saved_s: float | None = None
    saved_since: float | None = None
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return one line for people, such as ``"eager, building 7 of 16 (18 s left)"``."""
        if self.running == "off":
            return self._because("off")
        texts = (self.deepcache, self.guidance, self.substituted, self.problem, *self.notes)
        more = "".join(f"; {text}" for text in texts if text)
        return f"{self._drawing()}{self._building()}{more}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object, and the line for people under ``"line"``."""
        return {
            "schema": STATUS_SCHEMA,
            **asdict(self),
            "building_now": list(self.building_now),
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "eager_blocks": [
                {"reason": reason, "blocks": blocks} for reason, blocks in self.eager_blocks
            ],
            "changed_by": [
                {"reason": reason, "extension": name} for reason, name in self.changed_by
            ],
            "line": self.line(),
        }

    def _drawing(self) -> str:
        if self.running in ("compiled", COMPILED_IN_PART):
            gains = []
            if self.speedup is not None:
                times = times_faster(self.speedup)
                gains.append("no gain measured" if times is None else f"{times}x measured")
            if self.tuning_gain is not None:
                gains.append(f"tuned, +{self.tuning_gain:.0%}")
            gain = f" ({'; '.join(gains)})" if gains else ""
            return f"{self.running}{self._part()}{gain}"
        # During a build, the build is the reason, and the line says so already.
        return self.running if self.building else self._because(self.running)

    def _part(self) -> str:
        if self.running == "compiled":
            return ""
        if not self.blocks_needed:
            return f", {self.kinds_ready} of {self.kinds_needed} graphs"
        part = f", {self.blocks_compiled} of {self.blocks_needed} blocks"
        # During a build, the build is the reason, and the line says so already.
        why = self.reasons[0] if self.reasons and not self.building else ""
        return f"{part} ({why})" if why else part

    def _building(self) -> str:
        if self.building:
            done = self.kinds_ready + self.kinds_failed
            left = "" if self.seconds_left is None else f" ({duration(self.seconds_left)} left)"
            return f", building {done} of {self.kinds_needed}{left}"
        if self.waiting and (self.paused or self.cancelled):
            why = "paused" if self.paused else "cancelled"
            return f", {self.waiting} not built ({why})"
        if self.to_tune:
            return f", tuning {self.tuned} of {self.to_tune} while idle"
        if self.sizes_needed:
            return f", warming up {self.sizes_done} of {self.sizes_needed} sizes"
        return ""

    def _because(self, what: str) -> str:
        return f"{what}: {self.reasons[0]}" if self.reasons else what
