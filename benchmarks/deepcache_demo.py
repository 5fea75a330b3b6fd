"""How DeepCache changes the demo model's pictures: concepts recognised, and difference from off.

    python -m benchmarks.deepcache_demo --json FILE

Twelve concepts as in `tests/support/demo_pictures.py`, 20 steps of DPM++ 2M Karras at 128x128, not
compiled, in float32. CPU seconds are of the process, which draws all twelve in one batch.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.demo_concepts import DemoConcepts
from onediff_ext.hosts.diffusers.deepcache import (
    deepcache_state,
    disable_deepcache,
    enable_deepcache,
)

SETTINGS = ("off", "light", "medium", "medium depth=2", "strong", "strong depth=2", "10")


def main() -> int:
    demo = DemoConcepts("deepcache demo", __doc__.splitlines()[0])
    plain: Any = None
    rows = []
    for setting in SETTINGS:
        enable_deepcache(demo.pipe, setting)
        pictures, row = demo.draw()
        state = deepcache_state(demo.pipe)
        assert state is not None
        counts = dict(state.counts)
        disable_deepcache(demo.pipe)
        plain = pictures if plain is None else plain
        difference = float((pictures - plain).abs().mean())
        rows.append({"setting": setting, "counts": counts, **row, "difference": difference})
    demo.write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
