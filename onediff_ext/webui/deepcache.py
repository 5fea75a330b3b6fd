"""DeepCache inside a WebUI: its samplers say when a run begins and when they want a prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions, few_steps_refusal
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.deepcache_forward import DeepCache
from onediff_ext.hosts.unet_adapters import adapter_for


@dataclass(frozen=True)
class Evaluation:
    """One time that a sampler of the host asks for a prediction.

    Args:
        number: Of this run of the sampler, from 0.
        total: As many as the host expects in this run, or None; some samplers ask for more.
        samplers: Names of sampler and schedule.
        steps: Of the whole schedule, before image to image leaves some out; None if unknown.
        prompt: Which of the prompt's and the negative prompt's texts are in force, since
            ``[a:b:0.5]`` and ``[a|b]`` change them on the way.
    """

    number: int
    total: int | None
    samplers: tuple[str, ...]
    steps: int | None
    prompt: Hashable

    @classmethod
    def read(cls, parameters: Any) -> Evaluation:
        """From what the hosts hand to ``on_cfg_denoiser``: `CFGDenoiserParams`, alike in all."""
        denoiser = getattr(parameters, "denoiser", None)
        sampler = getattr(denoiser, "sampler", None)
        p = getattr(denoiser, "p", None)
        steps, schedule = getattr(p, "steps", None), getattr(p, "scheduler", None)
        if getattr(p, "is_hr_pass", False):
            steps = getattr(p, "hr_second_pass_steps", 0) or steps
            schedule = getattr(p, "hr_scheduler", None) or schedule
        name = getattr(getattr(sampler, "config", None), "name", None)
        number = int(getattr(denoiser, "step", 0) or 0)
        return cls(
            number=number,
            total=getattr(denoiser, "total_steps", None),
            samplers=tuple(str(text) for text in (name, schedule) if text),
            steps=steps,
            prompt=tuple(_texts_in_force(sampler, number)),
        )

    def refusal_reason(self, checkpoint: str) -> str | None:
        """Why there is nothing to win for DeepCache, or None."""
        reasons = (few_steps_refusal(name, self.steps) for name in (*self.samplers, checkpoint))
        return next(filter(None, reasons), None)


@dataclass
class DeepCacheTally:
    """What DeepCache did for one job, in all its runs.

    Args:
        counts: "full", "shallow" and "plain" calls of the UNet.
        reason: Why a run did without, or None.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reason: str | None = None

    def line(self) -> str:
        """For people; empty when nobody wanted it."""
        if self.reason is not None:
            return self.reason
        full, shallow = self.counts["full"], self.counts["shallow"]
        if not full and not shallow:
            return ""
        plain = f", {self.counts['plain']} without it" if self.counts["plain"] else ""
        return f"DeepCache: {shallow} of {full + shallow} UNet calls shallow{plain}"


class WebUIDeepCache:
    """DeepCache around one UNet of the host. Where nothing is to be reused, nothing is changed.

    Args:
        unet: The host's module.
    """

    def __init__(self, unet: nn.Module) -> None:
        self._unet = unet
        self._cache: DeepCache | None = None
        self._tally: DeepCacheTally | None = None  # of the run that goes on

    def begin_evaluation(
        self,
        options: DeepCacheOptions,
        evaluation: Evaluation,
        weights: Hashable,
        checkpoint: str,
        tally: DeepCacheTally,
        foreign: str | None = None,
    ) -> None:
        """The sampler asks for a prediction; the first of a run begins that.

        Args:
            options: What the user chose for this job.
            evaluation: Which one it is.
            weights: `WebUIHost.weights`; features of others are not used.
            checkpoint: Its name.
            tally: Where a run is added when it ends.
            foreign: Why the UNet's forward is another's: what that adds may begin and end on the
                way, unseen.
        """
        # A refiner's run begins in the middle.
        if evaluation.number == 0 or self._tally is None:
            self.end_run()
            refusal_reason = evaluation.refusal_reason(checkpoint)
            if foreign is not None:
                refusal_reason = refusal_reason or f"DeepCache is off: {foreign}"
            self._begin_run(options, evaluation, refusal_reason, tally)
        cache = self._cache
        if cache is not None and cache.options.is_on:
            cache.note("weights", weights)
            cache.note("prompt", evaluation.prompt)
            cache.begin_evaluation()

    def end_run(self) -> None:
        """The sampler has ended: give the memory back, and let calls of others through."""
        tally, self._tally = self._tally, None
        cache = self._cache
        if cache is None:
            return
        if tally is not None:
            tally.counts.update(cache.counts)
            cache.counts.clear()
        cache.end_picture()
        cache.options = OFF

    def remove(self) -> None:
        """Leave the UNet as it was. What captures hold is kept, and found again by a later run."""
        self.end_run()
        if self._cache is not None and not self._cache.remove():
            self._cache = None

    def forget(self) -> None:
        """The same, for good."""
        self.remove()
        self._cache = None

    @property
    def size_bytes(self) -> int:
        """Memory of all features, those held by captures included."""
        return 0 if self._cache is None else self._cache.size_bytes

    def _begin_run(
        self,
        options: DeepCacheOptions,
        evaluation: Evaluation,
        refusal_reason: str | None,
        tally: DeepCacheTally,
    ) -> None:
        self._tally = tally
        if not options.is_on:
            return
        if refusal_reason is not None:
            tally.reason = refusal_reason
            return
        try:
            if self._cache is None:
                self._cache = DeepCache(self._unet, adapter_for(self._unet))
            self._cache.begin_picture(
                options, evaluations=evaluation.total, first=evaluation.number
            )
        except OptionError as exc:
            tally.reason = str(exc)
            return
        if not self._cache.is_installed:
            self._cache.install()  # the outermost: graphs and captures are there already


def _texts_in_force(sampler: Any, number: int) -> Iterator[int]:
    """Of each prompt's schedule, the place of the entry for this evaluation.

    Source: reconstruct_cond_batch in the hosts' modules/prompt_parser.py.
    """
    given = getattr(sampler, "sampler_extra_args", None) or {}
    prompts = getattr(given.get("cond"), "batch", None) or ()
    schedules = [part.schedules for parts in prompts for part in parts]
    for schedule in [*schedules, *(given.get("uncond") or ())]:
        ends = [entry.end_at_step for entry in schedule]
        yield next((place for place, end in enumerate(ends) if number <= end), 0)
