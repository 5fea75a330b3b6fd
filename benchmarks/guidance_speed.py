"""Milliseconds of a UNet's step before and after a gate, at full width with random weights.

    python -m benchmarks.guidance_speed --model sdxl --size 1024x1024 --json FILE

Each setting draws pictures of `--steps` forwards with the same noise at falling timesteps, by the
settings in turn. The blocks run through graphs and, on a GPU, forwards are recorded as CUDA graphs;
pictures are drawn until nothing more is built, compared or recorded, and then timed. Figures are
the median of all steps of one kind: with guidance, the gate's own step, and without guidance. A
picture's milliseconds are its steps' alone, the median of `--pictures`. "Error" is that of a
picture's last prediction beside eager at the same setting; "eager" rows are those of the same
UNet without graphs. ``--model tiny --size 96x80`` tries it on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES, make_unet
from benchmarks.results import measure_and_write
from benchmarks.timing import median_and_p95, peak_bytes, reset_peak, step_times_ms
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.options import BACKENDS, CompileOptions
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.engine.guidance.guided_forward import GuidedCall, GuidedForward
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, new_session
from onediff_ext.hosts.diffusers.jobs.run_report import recompile_count
from onediff_ext.hosts.diffusers.jobs.step_bench import paused
from onediff_ext.hosts.diffusers.probe import unet_inputs

SETTINGS = ("off", "interval:0-0.4", "gate:0.4")
# After the first picture there are graphs; five more have all CUDA graphs compared.
WARM_UP_PICTURES = 8


class Pictures:
    """Draws pictures with one setting, and times their steps.

    Args:
        unet: Compiled or eager.
        inputs: Of one forward with both halves of the batch.
        options: Which steps have guidance.
        steps: Of a picture.
    """

    def __init__(
        self, unet: Any, inputs: dict[str, Any], options: GuidanceOptions, steps: int
    ) -> None:
        self._unet, self._inputs, self.options, self._steps = unet, inputs, options, steps
        self.device = inputs["sample"].device
        self._step = -1
        self.frozen, self.reason = 0, ""

    @torch.no_grad()
    def draw(self, session: Any) -> tuple[list[float], torch.Tensor]:
        """Return the milliseconds of each step, and the last prediction [2, 4, H/8, W/8]."""
        inputs = dict(self._inputs)
        inputs.pop("timestep")
        timesteps = torch.linspace(999, 1, self._steps, device=self.device)
        self._step, given = -1, iter(timesteps)
        found: list[torch.Tensor] = []

        def step() -> None:
            self._step += 1
            found[:] = [self._unet(timestep=next(given), **inputs).sample]

        with session.picture(), self._guided():
            times = step_times_ms(step, self._steps, self.device)
        return times, found[0]

    def kinds(self) -> list[str]:
        """What each step of a picture is."""
        return [self._kind(step) for step in range(self._steps)]

    def _kind(self, step: int) -> str:
        if self.options.keeps_attention(step, self._steps):
            return "gate"
        return "with" if self.options.has_guidance(step, self._steps) else "without"

    @contextmanager
    def _guided(self) -> Iterator[None]:
        if not self.options.is_on:
            yield
            return
        forward = GuidedForward(self._unet, self.options, self._read)
        with forward.drawing():
            yield
        if forward.gate is not None:
            self.frozen, self.reason = forward.gate.frozen, forward.gate.reason

    def _read(self, _: Sequence[Any], kwargs: Any) -> GuidedCall:
        return GuidedCall(self._step, self._steps, kwargs["sample"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="sdxl", help="sd1, sd2, sdxl, or small or tiny")
    parser.add_argument("--size", default="1024x1024", help="such as 960x720")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=10, help="timed pictures of each setting")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="guidance steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=BACKENDS, default="inductor")
    parser.add_argument("--store", type=Path, help="graphs of an earlier run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measure_and_write(arguments, measure)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all settings in turn, so that a slow moment affects all of them."""
    device = torch.device(arguments.device)
    dtype = "fp16" if device.type == "cuda" else "fp32"
    width, height = (int(side) for side in arguments.size.split("x"))
    unet = make_unet(arguments.model, device, DTYPES[dtype])
    unet = unet.to(memory_format=torch.channels_last)
    models = SimpleNamespace(unet=unet)
    inputs = unet_inputs(
        unet, torch.Generator().manual_seed(1), height_latent=height // 8, width_latent=width // 8
    )
    inputs["sample"] = inputs["sample"][:1].repeat(2, 1, 1, 1)  # both halves draw one picture
    session = new_session(
        CompileOptions(backend=arguments.backend, store=arguments.store, build="wait")
    )
    compile_pipe(models, session=session)
    chosen = [
        Pictures(unet, inputs, GuidanceOptions.parse(text), arguments.steps)
        for text in arguments.settings
    ]
    for pictures in chosen:
        for _ in range(WARM_UP_PICTURES):
            pictures.draw(session)
    recompiles = recompile_count()
    rows = [
        _row(models, session, chosen, arguments.pictures, is_eager=False),
        _row(models, session, chosen, arguments.pictures, is_eager=True),
    ]
    state = compiled_state(models)
    assert state is not None
    return {
        "what": "guidance speed",
        "model": arguments.model,
        "width": width,
        "height": height,
        "steps": arguments.steps,
        "pictures": arguments.pictures,
        "dtype": dtype,
        "backend": arguments.backend,
        "fingerprint": fingerprint(device),
        "captures": len(session.cuda_graphs),
        "captures_dropped": list(session.cuda_graphs.dropped),
        "recompiles": recompile_count() - recompiles,
        "states": sorted({kind.state.value for kind in session.kinds}),
        "fallbacks": [vars(each) for each in session.fallbacks()],
        "rows": [row for group in rows for row in group],
    }


def _row(
    models: Any, session: Any, chosen: list[Pictures], count: int, *, is_eager: bool
) -> list[dict[str, Any]]:
    """One row for each setting."""
    state = compiled_state(models)
    assert state is not None
    times: list[dict[str, list[float]]] = [defaultdict(list) for _ in chosen]
    sums: list[list[float]] = [[] for _ in chosen]
    last: list[Any] = [None] * len(chosen)
    peaks = [0] * len(chosen)
    with paused(state) if is_eager else nullcontext():
        for _ in range(count):
            for n, pictures in enumerate(chosen):
                reset_peak(pictures.device)
                each, last[n] = pictures.draw(session)
                peaks[n] = max(peaks[n], peak_bytes(pictures.device))
                sums[n].append(sum(each))
                for kind, ms in zip(pictures.kinds(), each, strict=True):
                    times[n][kind].append(ms)
    rows = []
    for n, pictures in enumerate(chosen):
        with paused(state):
            _, expected = pictures.draw(session)
        row: dict[str, Any] = {
            "contender": "eager" if is_eager else "ours-exact",
            "guidance_steps": str(pictures.options),
            "picture_ms": statistics.median(sums[n]),
            "error": compare(last[n], expected).error,
            "peak_bytes": peaks[n],
            "frozen_steps": pictures.frozen,
            "reason": pictures.reason,
        }
        for kind, found in times[n].items():
            row[f"{kind}_ms"], row[f"{kind}_p95_ms"] = median_and_p95(found)
            row[f"{kind}_steps"] = pictures.kinds().count(kind)
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
