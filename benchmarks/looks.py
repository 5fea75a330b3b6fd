"""What the looks at a model cost a step: ``python -m benchmarks.looks --model sdxl --json FILE``.

Around each replay the model is looked at, so that no stale CUDA graph draws (docs/soundness.md).
Steps with and without these looks take turns, so that both meet the same clock of the GPU.
``before_ms`` is Python's time until a replay is launched, during which the GPU has nothing to do;
``behind_ms`` is its time from there to the end of the call, while the GPU works. With ``--lora``
peft has a LoRA in each attention layer, whose layers are looked at too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.contenders import Ours
from benchmarks.fingerprint import fingerprint
from benchmarks.models import DTYPES, make_unet
from benchmarks.results import now, write_result
from benchmarks.timing import step_times_ms
from onediff_ext.core.shapes import parse_sizes
from onediff_ext.engine.cuda_graphs.model_tracker import ModelTracker
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.hosts.diffusers.probe import unet_inputs
from tests.support.adapter_weights import lora_tensors

ROUNDS, STEPS, UNTIL_REPLAYED = 10, 20, 8


@contextmanager
def without_looks() -> Iterator[None]:
    """Within it, a model counts as unchanged without being looked at."""
    with ExitStack() as stack:
        for cls, name in (
            (Snapshot, "weights_lie_where_they_did"),
            (ModelTracker, "is_still"),
            (ModelTracker, "has_current_derived_weights"),
        ):
            stack.enter_context(mock.patch.object(cls, name, _true))
        yield


def _true(*_: Any, **__: Any) -> bool:
    return True


def cost_of_looks(
    step: Callable[[], Any], device: torch.device, rounds: int = ROUNDS, steps: int = STEPS
) -> dict[str, float]:
    """Time replayed steps with and without looks.

    Args:
        step: One call of the model, replayed by now.
        device: Where it runs.
        rounds, steps: Rounds of each kind, and steps in a round.

    Returns:
        Medians in milliseconds: `step_ms`, `without_looks_ms`, `before_ms`, `behind_ms`; and
        `looks_percent`, the share of a step that is gone without looks.
    """
    looking, blind = list[float](), list[float]()
    for _ in range(rounds):
        looking += step_times_ms(step, steps, device)
        with without_looks():
            blind += step_times_ms(step, steps, device)
    before, behind = _python_times_ms(step, steps)
    with_ms, without_ms = statistics.median(looking), statistics.median(blind)
    return {
        "step_ms": round(with_ms, 3),
        "without_looks_ms": round(without_ms, 3),
        "looks_percent": round(100 * (1 - without_ms / with_ms), 2),
        "before_ms": round(statistics.median(before), 3),
        "behind_ms": round(statistics.median(behind), 3),
    }


def _python_times_ms(step: Callable[[], Any], steps: int) -> tuple[list[float], list[float]]:
    """Python's time of each step until the replay is launched, and from there on."""
    launched: list[float] = []
    is_still = ModelTracker.is_still

    def noted(tracker: ModelTracker, *args: Any) -> bool:
        launched.append(time.perf_counter())
        return is_still(tracker, *args)

    before, behind = list[float](), list[float]()
    with mock.patch.object(ModelTracker, "is_still", noted):
        for _ in range(steps):
            began = time.perf_counter()
            step()
            before.append(1e3 * (launched[-1] - began))
            behind.append(1e3 * (time.perf_counter() - launched[-1]))
    return before, behind


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("sd1", "sdxl"), default="sdxl")
    parser.add_argument("--sizes", default="512x512, 1024x1024")
    parser.add_argument("--lora", action="store_true", help="with a LoRA that is not fused")
    parser.add_argument("--store", type=Path, help="keep graphs here")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, rows = torch.device("cuda"), []
    with tempfile.TemporaryDirectory(prefix="onediff-looks-") as folder, torch.no_grad():
        unet = make_unet(given.model, device, DTYPES["fp16"]).to(memory_format=torch.channels_last)
        if given.lora:
            tensors = lora_tensors(SimpleNamespace(unet=unet), text=False)
            tensors = {name: each.to(unet.dtype) for name, each in tensors.items()}
            unet.load_lora_adapter(tensors, prefix="unet")
        # Comparisons at random would be counted as looks.
        ours = Ours("ours", build="wait", spot_checks=False)
        model = ours.make(unet, given.store or Path(folder))
        for size in parse_sizes(given.sizes):
            arguments = unet_inputs(
                *(model, torch.Generator().manual_seed(1)),
                height_latent=size.height_px // 8,
                width_latent=size.width_px // 8,
            )
            for _ in range(UNTIL_REPLAYED):
                model(**arguments)
            row = cost_of_looks(partial(model, **arguments), device)
            rows.append({"width": size.width_px, "height": size.height_px, **row})
            print(rows[-1], flush=True)
    if given.json is not None:
        what = f"looks at a UNet{' with a LoRA' * given.lora} around a replay, CFG batch 2"
        head = {"what": what, "model": given.model}
        machine = {"fingerprint": fingerprint(device), "measured": now()}
        write_result(given.json, {**head, **machine, "rows": rows})


if __name__ == "__main__":
    main()
