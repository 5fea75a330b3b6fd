"""Guidance in some steps only inside a WebUI, driven by the callbacks of the host's samplers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.engine.guidance.guided_forward import GuidedCall, GuidedForward
from onediff_ext.hosts.ldm_guidance import OTHER_LATENTS, draws_one_latent, read_ldm_call
from onediff_ext.webui.deepcache import Evaluation

WITHOUT_STEPS = "the sampler does not say how many steps there are"
SEVERAL_CALLS = "the UNet is called several times for one prediction"


@dataclass
class GuidanceTally:
    """The counts of guidance steps over all runs of one job.

    Args:
        counts: Calls of the UNet, as `GuidedForward.counts`.
        reason: Why a call ran whole although the user wants guidance steps, or "".
        frozen: Calls with frozen cross-attention.
        gate_reason: Why there were others after the gate, or "".
    """

    counts: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    frozen: int = 0
    gate_reason: str = ""

    def line(self) -> str:
        """One line for the status; empty when guidance steps are off."""
        alone, calls = self.counts["prompt"], self.counts.total()
        if self.reason and not alone:
            return f"Guidance in all steps: {self.reason}"
        if self.gate_reason:
            return f"Guidance left out, cross-attention in {self.frozen} calls: {self.gate_reason}"
        if self.frozen:
            return f"Guidance and cross-attention left out in {self.frozen} of {calls} UNet calls"
        return f"Guidance left out in {alone} of {calls} UNet calls" if calls else ""


class WebUIGuidance:
    """Guidance steps of one UNet of the host. The UNet is unchanged between runs.

    Args:
        unet: The host's module.
    """

    def __init__(self, unet: nn.Module) -> None:
        self._unet = unet
        self._forward: GuidedForward | None = None
        self._tally: GuidanceTally | None = None
        self._evaluation: Evaluation | None = None
        self._refusal = ""
        self._is_compared, self._is_split, self._calls = False, False, 0

    def begin_evaluation(
        self,
        options: GuidanceOptions,
        evaluation: Evaluation,
        tally: GuidanceTally,
        foreign: str | None = None,
    ) -> None:
        """The sampler asks for a prediction. The first prediction of a run begins the run.

        It has to be called after DeepCache's, which it stands around.

        Args:
            options: What the user chose for this job.
            evaluation: The prediction.
            tally: A run is added to it when the run ends.
            foreign: As for `WebUIDeepCache.begin_evaluation`.
        """
        # A refiner's run begins in the middle of the schedule.
        if evaluation.number == 0 or self._tally is None:
            self.end_run()
            self._tally, self._is_compared, self._is_split = tally, False, False
            if options.is_on:
                self._forward = GuidedForward(self._unet, options, self._read)
                self._forward.begin()
        self._evaluation, self._refusal, self._calls = evaluation, foreign or "", 0

    def end_run(self) -> None:
        """End the run: the UNet is unchanged until the next one. A second call does nothing."""
        forward, self._forward = self._forward, None
        tally, self._tally = self._tally, None
        if forward is None:
            return
        forward.end()
        if tally is not None:
            tally.counts.update(forward.counts)
            tally.reason = tally.reason or forward.reason
            if forward.gate is not None:
                tally.frozen += forward.gate.frozen
                tally.gate_reason = tally.gate_reason or forward.gate.reason

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GuidedCall | str:
        evaluation = self._evaluation
        self._calls += 1
        self._is_split |= self._calls > 1
        if self._refusal or evaluation is None or not evaluation.total:
            return self._refusal or WITHOUT_STEPS
        # Some samplers ask more often than they say.
        step = min(evaluation.number, evaluation.total - 1)
        total, rows = evaluation.total, evaluation.rows
        call = read_ldm_call(args, kwargs, step, total, rows, evaluation.prompt)
        if isinstance(call, GuidedCall) and self._is_split:
            return SEVERAL_CALLS  # others may draw other parts of the prediction
        if isinstance(call, GuidedCall) and not self._is_compared:
            if not draws_one_latent(args, kwargs):
                return OTHER_LATENTS
            self._is_compared = True
        return call
