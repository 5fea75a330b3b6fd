"""How DeepCache changes the demo model's pictures: concepts recognised, and difference from off.

    python -m benchmarks.deepcache_demo --json FILE

Twelve concepts as in `tests/support/demo_pictures.py`, 20 steps of DPM++ 2M Karras at 128x128, not
compiled, in float32. CPU seconds are of the process, which draws all twelve in one batch.
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
from tests.support.demo_pictures import (
    CONCEPTS,
    draw,
    load_pipeline,
    load_references,
    nearest_concept,
    prompt_of,
)

SETTINGS = ("off", "light", "medium", "medium depth=2", "strong", "strong depth=2", "10")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipe = load_pipeline()
    references = load_references()
    prompts = [prompt_of(name) for name in CONCEPTS]
    plain: Any = None
    rows = []
    for setting in SETTINGS:
        enable_deepcache(pipe, setting)
        start = time.process_time()
        pictures = draw(pipe, prompts, steps=arguments.steps)
        seconds = time.process_time() - start
        state = deepcache_state(pipe)
        assert state is not None
        counts = dict(state.counts)
        disable_deepcache(pipe)
        plain = pictures if plain is None else plain
        found = [nearest_concept(picture, references) for picture in pictures]
        rows.append(
            {
                "setting": setting,
                "counts": counts,
                "cpu_s": seconds,
                "recognised": sum(a == b for a, b in zip(found, CONCEPTS, strict=True)),
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
