"""DeepCache inside a WebUI, driven by the callbacks of the host's samplers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions, few_steps_reason
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.deepcache_forward import DeepCache
from onediff_ext.hosts.unet_adapters import adapter_for


@dataclass(frozen=True)
class Evaluation:
    """One prediction that a sampler of the host asks for.

    Args:
        number: Its number in this run of the sampler, from 0.
        total: The number that the host expects in this run, or None; some samplers ask for more.
        samplers: Names of sampler and schedule.
        steps: Steps of the whole schedule, before img2img skips some; None if unknown.
        prompt: Identifies the active texts of prompt and negative prompt. ``[a:b:0.5]`` and
            ``[a|b]`` change them during the run.
        rows: How many encoded prompts and negative prompts there are; None if unknown.
    """

    number: int
    total: int | None
    samplers: tuple[str, ...]
    steps: int | None
    prompt: Hashable
    rows: tuple[int, int] | None = None

    @classmethod
    def read(cls, parameters: Any) -> Evaluation:
        """Read the argument of ``on_cfg_denoiser``: `CFGDenoiserParams`, the same in all hosts."""
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
            prompt=tuple(_active_texts(sampler, number)),
            rows=_rows(parameters),
        )

    def refusal_reason(self, checkpoint: str) -> str | None:
        """Why DeepCache gains nothing in this run, or None."""
        reasons = (few_steps_reason(name, self.steps) for name in (*self.samplers, checkpoint))
        return next(filter(None, reasons), None)


@dataclass
class DeepCacheTally:
    """The counts of DeepCache over all runs of one job.

    Args:
        counts: Calls of the UNet: "full", "shallow" and "plain" (without DeepCache).
        reason: Why a run did not use DeepCache, or None.
    """

    counts: Counter[str] = field(default_factory=Counter)
    reason: str | None = None

    def line(self) -> str:
        """One line for the status; empty when DeepCache is off."""
        if self.reason is not None:
            return self.reason
        full, shallow = self.counts["full"], self.counts["shallow"]
        if not full and not shallow:
            return ""
        plain = f", {self.counts['plain']} without it" if self.counts["plain"] else ""
        return f"DeepCache: {shallow} of {full + shallow} UNet calls shallow{plain}"


class WebUIDeepCache:
    """DeepCache around one UNet of the host. The UNet is unchanged while DeepCache is off.

    Args:
        unet: The host's module.
    """

    def __init__(self, unet: nn.Module) -> None:
        self._unet = unet
        self._cache: DeepCache | None = None
        self._tally: DeepCacheTally | None = None  # of the current run

    def begin_evaluation(
        self,
        options: DeepCacheOptions,
        evaluation: Evaluation,
        weights: Hashable,
        checkpoint: str,
        tally: DeepCacheTally,
        foreign: str | None = None,
    ) -> None:
        """The sampler asks for a prediction. The first prediction of a run begins the run.

        Args:
            options: What the user chose for this job.
            evaluation: The prediction.
            weights: `WebUIHost.weights`; features of other weights are discarded.
            checkpoint: The checkpoint's name.
            tally: A run is added to it when the run ends.
            foreign: Why another extension runs the UNet's forward, or calls the UNet for parts of a
                picture; None if none does. Its additions may begin and end, and its parts may move,
                without notice.
        """
        # A refiner's run begins in the middle of the schedule.
        if evaluation.number == 0 or self._tally is None:
            self.end_run()
            refusal_reason = evaluation.refusal_reason(checkpoint)
            if foreign is not None:
                refusal_reason = refusal_reason or f"DeepCache is off: {foreign}"
            self._begin_run(options, evaluation, refusal_reason, tally)
        elif foreign is not None and self._cache is not None and self._cache.options.is_on:
            self._cache.refuse(f"DeepCache is off: {foreign}")
        cache = self._cache
        if cache is not None and cache.options.is_on:
            cache.note("weights", weights)
            cache.note("prompt", evaluation.prompt)
            cache.begin_evaluation()

    def end_run(self) -> None:
        """End the run: free the features. Calls of the UNet are plain until the next run."""
        tally, self._tally = self._tally, None
        cache = self._cache
        if cache is None:
            return
        if tally is not None:
            tally.counts.update(cache.counts)
            tally.reason = tally.reason or cache.reason
            cache.counts.clear()
        cache.end_picture()
        cache.options = OFF

    def remove(self) -> None:
        """Restore the UNet. Features inside CUDA graphs are kept and reused by a later run."""
        self.end_run()
        if self._cache is not None and not self._cache.remove():
            self._cache = None

    def forget(self) -> None:
        """Restore the UNet for good."""
        self.remove()
        self._cache = None

    @property
    def size_bytes(self) -> int:
        """Memory of all features, including those inside CUDA graphs."""
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
            self._cache.install()  # outermost: block runners and CUDA graphs are installed already


def _rows(parameters: Any) -> tuple[int, int] | None:
    """The rows of the encoded prompts and negative prompts: tensors, or mappings of them."""
    found = []
    for name in ("text_cond", "text_uncond"):
        text = getattr(parameters, name, None)
        tensor = text.get("crossattn") if isinstance(text, dict) else text
        if not isinstance(tensor, torch.Tensor):
            return None
        found.append(tensor.shape[0])
    return found[0], found[1]


def _active_texts(sampler: Any, number: int) -> Iterator[int]:
    """The index of the active entry in each prompt's schedule.

    Source: reconstruct_cond_batch in the hosts' modules/prompt_parser.py.
    """
    given = getattr(sampler, "sampler_extra_args", None) or {}
    prompts = getattr(given.get("cond"), "batch", None) or ()
    schedules = [part.schedules for parts in prompts for part in parts]
    for schedule in [*schedules, *(given.get("uncond") or ())]:
        ends = [entry.end_at_step for entry in schedule]
        yield next((place for place, end in enumerate(ends) if number <= end), 0)
