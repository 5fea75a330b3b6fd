"""What DeepCache does to the demo model's pictures: recognised or not, and how far from without.

    python -m benchmarks.deepcache_demo --json FILE

Twelve concepts as in `tests/hosts/diffusers/test_demo_model.py`, 20 steps of DPM++ 2M Karras at
128x128, not compiled, in float32. CPU seconds are of the process, drawing all twelve at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from onediff_ext.hosts.diffusers.deepcache import (
    deepcache_state,
    disable_deepcache,
    enable_deepcache,
)
from tests.hosts.diffusers import test_demo_model as demo

SETTINGS = ("off", "light", "medium", "medium depth=2", "strong", "strong depth=2", "10")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipe = demo.load_pipeline()
    references = demo.load_references()
    prompts = [demo.prompt_of(name) for name in demo.CONCEPTS]
    plain: Any = None
    rows = []
    for setting in SETTINGS:
        enable_deepcache(pipe, setting)
        start = time.process_time()
        pictures = demo._draw(pipe, prompts, steps=arguments.steps)
        seconds = time.process_time() - start
        state = deepcache_state(pipe)
        assert state is not None
        counts = dict(state.counts)
        disable_deepcache(pipe)
        plain = pictures if plain is None else plain
        found = [demo._nearest(picture, references) for picture in pictures]
        rows.append(
            {
                "setting": setting,
                "counts": counts,
                "cpu_s": seconds,
                "recognised": sum(a == b for a, b in zip(found, demo.CONCEPTS, strict=True)),
                "difference": float((pictures - plain).abs().mean()),
            }
        )
    figures = {
        "what": "deepcache demo",
        "steps": arguments.steps,
        "concepts": len(prompts),
        "fingerprint": fingerprint(torch.device("cpu")),
        "rows": rows,
    }
    text = json.dumps(figures, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
