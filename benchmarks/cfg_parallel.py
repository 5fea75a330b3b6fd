"""One picture on one GPU and on two: ``python -m benchmarks.cfg_parallel --json FILE``.

A text to image pipeline with random weights draws the same pictures with `compile_pipe` on one
device, then with the option ``cfg_parallel``. Measured are whole pictures, from the prompt to
pixels in main memory, and single forwards of the denoiser; compared are the pictures of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.models import make_pipeline
from benchmarks.results import write_result
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.probe import denoiser_inputs
from onediff_ext.session.model_component import Component

_PROMPTS = {"prompt": "a painting of a quiet harbour at dawn", "negative_prompt": "blurry"}
_FORWARDS = 40
_WARM_UPS = 3  # a shape is seen, recorded and compared
_SETTLING = 20  # forwards, until the devices are timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="sdxl", help="sdxl, sd15, small or tiny")
    parser.add_argument("--size", default="1024x1024")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pictures", type=int, default=5)
    parser.add_argument("--other", default="auto", help="the other device, such as cuda:1")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--store", type=Path, help="default: an empty one, filled first")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    width_px, height_px = (int(side) for side in arguments.size.split("x"))
    pipe = make_pipeline(arguments.model, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    store = arguments.store or Path(tempfile.mkdtemp(prefix="onediff-cfg-"))
    result: dict[str, Any] = {
        "what": "one picture on one GPU and on two",
        "model": arguments.model,
        "fingerprint": fingerprint(device),
        "dtype": str(dtype).removeprefix("torch."),
        "width": width_px,
        "height": height_px,
        "steps": arguments.steps,
        "guidance": 7.0,
    }
    pictures: dict[str, torch.Tensor] = {}
    for name, parallel in (("one", "off"), ("two", arguments.other)):
        options = {"store": store, "build": "wait", "backend": arguments.backend}
        compile_pipe(pipe, options={**options, "cfg_parallel": parallel})
        result[name], pictures[name] = _measure(pipe, arguments, width_px, height_px)
        print(json.dumps({name: result[name]}), file=sys.stderr, flush=True)
        undo_compile(pipe)
    difference = (pictures["one"].double() - pictures["two"].double()).abs()
    mean_square = float((difference**2).mean())
    result |= {
        "times_faster": _ratio(result, "picture_s"),
        "times_faster_forward": _ratio(result, "forward_ms"),
        "largest_difference_levels": round(float(difference.max()) * 255, 2),
        "psnr_db": None if mean_square == 0 else round(10 * _log10(1 / mean_square), 2),
        "contrast_levels": round(float(pictures["one"].std()) * 255, 2),
    }
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        write_result(arguments.json, result)
    return 0


def _measure(
    pipe: Any, arguments: argparse.Namespace, width_px: int, height_px: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return figures, and the picture [1, 3, H, W] of seed 0."""

    def draw(steps: int, seen: _Seen | None = None) -> torch.Tensor:
        found: torch.Tensor = pipe(
            **_PROMPTS,
            width=width_px,
            height=height_px,
            num_inference_steps=steps,
            guidance_scale=7.0,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
            callback_on_step_end=None if seen is None else seen.after_step,
        ).images.cpu()
        return found

    for _ in range(_WARM_UPS):
        draw(6)
    draw(arguments.steps)
    state = compiled_state(pipe)
    assert state is not None
    [denoiser] = [each for each in state.components if each.role.is_denoiser]
    parallel = denoiser.cfg_parallel
    seconds, seen = [], _Seen(denoiser)
    for _ in range(arguments.pictures):
        start = time.perf_counter()
        picture = draw(arguments.steps, seen)
        seconds.append(time.perf_counter() - start)
    seen_forwards = _Seen(denoiser)
    forward_ms, host_ms = _time_forwards(pipe, width_px, height_px, seen_forwards)
    figures = {
        "picture_s": round(statistics.median(seconds), 4),
        "pictures_s": [round(each, 4) for each in seconds],
        "forward_ms": round(forward_ms, 3),
        "host_ms": round(host_ms, 3),
        "cuda_graphs": len(state.session.cuda_graphs),
        "graphs": sum(kind.graph is not None for kind in state.session.kinds),
        "kinds": len(state.session.kinds),
        "devices": [] if parallel is None else list(map(str, parallel.devices)),
        "reason": "" if parallel is None else parallel.reason,
        "steps": seen.figures(),
        "forwards": seen_forwards.figures(),
        "dropped": list(state.session.cuda_graphs.dropped)[-5:],
        "fallbacks": [f"{f.what}: {f.reason} ({f.count})" for f in state.session.fallbacks()],
    }
    return figures, picture


class _Seen:
    """What ran on each device, read after each forward.

    Args:
        denoiser: Its component.
    """

    def __init__(self, denoiser: Component) -> None:
        self._denoiser, self._parallel = denoiser, denoiser.cfg_parallel
        self._compared = self._comparisons()
        self._on: dict[str, Counter[str]] = {}
        self._why: dict[str, Counter[str]] = {}

    def after_step(self, _pipe: Any, _step: int, _timestep: Any, tensors: Any) -> Any:
        """Note a step of a pipeline."""
        self.note()
        return tensors

    def note(self) -> None:
        """Note one forward."""
        devices = () if self._parallel is None else self._parallel.devices
        self._note("model", self._denoiser)
        if len(devices) > 1 and self._parallel is not None and self._parallel.replica is not None:
            self._note("replica", self._parallel.replica)

    def figures(self) -> dict[str, Any]:
        """Return forwards by place and kind, why some were not replayed, and comparisons."""
        return {
            "by_place": {place: dict(counts) for place, counts in self._on.items()},
            "not_replayed": {place: dict(why) for place, why in self._why.items()},
            "compared_with_one": self._comparisons() - self._compared,
        }

    def _note(self, place: str, component: Component) -> None:
        device = next(component.model.parameters()).device
        captured, place = component.captured, f"{place} on {device}"
        is_replayed = captured is not None and captured.replayed
        kind = "replayed" if is_replayed else "in Python"
        self._on.setdefault(place, Counter())[kind] += 1
        if captured is not None and not is_replayed:
            self._why.setdefault(place, Counter())[captured.reason or "being compared"] += 1

    def _comparisons(self) -> int:
        return 0 if self._parallel is None else self._parallel.comparisons


def _time_forwards(pipe: Any, width_px: int, height_px: int, seen: _Seen) -> tuple[float, float]:
    """Return milliseconds of a forward in a row, and of the host's own work for it."""
    inputs = denoiser_inputs(
        pipe.unet, torch.Generator().manual_seed(1), height_px=height_px, width_px=width_px
    )
    assert inputs is not None
    with torch.no_grad(), compiled_state(pipe).session.picture():  # type: ignore[union-attr]
        for _ in range(_SETTLING):
            pipe.unet(**inputs, return_dict=False)
        _synchronize()
        start = time.perf_counter()
        for _ in range(_FORWARDS):
            pipe.unet(**inputs, return_dict=False)
            seen.note()
        launched = time.perf_counter()
        _synchronize()
        ended = time.perf_counter()
    return (ended - start) * 1000 / _FORWARDS, (launched - start) * 1000 / _FORWARDS


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _ratio(result: dict[str, Any], name: str) -> float:
    return round(float(result["one"][name] / result["two"][name]), 3)


def _log10(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log10())


if __name__ == "__main__":
    sys.exit(main())
