"""A warm-up as one of the host's own jobs: it waits for its turn and gives way to pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from onediff_ext.core.components import Role
from onediff_ext.core.guidance_options import ALL_STEPS, GuidanceOptions
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.guidance.guided_forward import GuidedCall
from onediff_ext.engine.guidance.sample_steps import STEPS, run_sample_steps
from onediff_ext.hosts.ldm_guidance import read_ldm_call
from onediff_ext.session.warm_up import WarmUp
from onediff_ext.session.warm_up_passes import WarmUpControl, in_passes
from onediff_ext.session.warm_up_report import WarmUpReport
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs


class WarmUpJobs:
    """Warms up the host's current checkpoint.

    Args:
        graphs: Attaches the models for the length of each pass.
    """

    def __init__(self, graphs: GraphsForJobs) -> None:
        self._graphs, self._host = graphs, graphs.host
        self._control = WarmUpControl()

    def run(
        self,
        shapes: Sequence[BatchShape],
        options: CompileOptions,
        ignores: frozenset[str] = frozenset(),
        guidance_steps: GuidanceOptions = ALL_STEPS,
    ) -> WarmUpReport | None:
        """Make and measure everything that pictures of these sizes need, and wait for it.

        Each pass is one of the host's own jobs. A pass ends early when another job waits; the
        next pass does the remaining sizes.

        Args:
            shapes: Sizes and pictures at once.
            options, ignores: As in `GraphsForJobs.begin`; missing graphs are built whatever
                `options.build` says.
            guidance_steps: Of the pictures.

        Returns:
            What was done; None when nothing could be done, for a reason that
            `GraphsForJobs.status` has.
        """
        self._control.start()
        first_checkpoint: list[object] = []

        def one_pass(left: list[BatchShape]) -> WarmUpReport | None:
            reports: list[WarmUpReport | None] = []

            def task() -> None:
                checkpoint = self._host.checkpoint()
                identity = checkpoint and (checkpoint.name, checkpoint.digest)
                first_checkpoint.append(identity)
                if identity != first_checkpoint[0]:
                    return  # the user loaded another one meanwhile, for which nothing was asked
                if self._control.is_cancelled:
                    reports.append(WarmUpReport(cancelled=True))
                    return
                job = _WarmUpJob()
                try:
                    with self._graphs.eager.on_failure():
                        measured = len(shapes) - len(left)
                        done = self._pass(job, left, options, ignores, guidance_steps, measured)
                        reports.append(done)
                finally:
                    self._graphs.end(job)

            self._host.run_exclusively(task)
            return reports[0] if reports else None

        shapes = list(dict.fromkeys(shapes))
        return in_passes(shapes, one_pass, lambda: self._control.is_cancelled)

    def cancel(self) -> None:
        """End a warm-up, all builds and a pause within a moment.

        Finished graphs stay; the next picture, or a warm-up, has the others built.
        """
        self._control.cancel()
        self._graphs.cancel_builds()

    def _pass(
        self,
        job: _WarmUpJob,
        shapes: Sequence[BatchShape],
        options: CompileOptions,
        ignores: frozenset[str],
        guidance_steps: GuidanceOptions,
        measured: int,
    ) -> WarmUpReport | None:
        graphs, host = self._graphs, self._host

        session = graphs.begin_without_picture(job, replace(options, build="background"), ignores)
        denoisers = [attachment.component for attachment in graphs.models.denoisers]
        parameter = next((p for component in denoisers for p in component.model.parameters()), None)
        if parameter is None:
            if not graphs.eager.reasons:
                graphs.eager.add("there is no UNet to warm up")
            return None
        warm_up = WarmUp(
            session,
            denoisers,
            host.step,
            host.vae_step,
            shapes,
            parameter.device,
            give_way=host.is_waited_for,
            measured_before=measured,
            guided=self._guided(guidance_steps),
        )
        return self._control.run(warm_up)

    def _guided(
        self, options: GuidanceOptions
    ) -> Callable[[BatchShape, torch.Generator], None] | None:
        """What to run for guidance steps; None where pictures of the UNet have none."""
        components = [attachment.component for attachment in self._graphs.models.denoisers]
        unet = next((each for each in components if each.role is Role.UNET), None)
        if unet is None or unet.foreign or not options.is_on:
            return None

        def run(shape: BatchShape, noise: torch.Generator) -> None:
            step = partial(self._host.step, shape, noise)
            run_sample_steps(unet.model, options, step, read_step=partial(_read, shape.batch))

        return run


def _read(
    pictures: int, args: Sequence[Any], kwargs: Mapping[str, Any], step: int
) -> GuidedCall | str:
    return read_ldm_call(args, kwargs, step, STEPS, (pictures, pictures))


class _WarmUpJob:
    """Stands for a processing object in a job without a picture."""
