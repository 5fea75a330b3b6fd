"""Random sizes and batches with a filled store: no recompile, no growth of memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from onediff_ext.hosts.diffusers.compile import compile_pipe
from onediff_ext.hosts.diffusers.jobs.run_report import recompile_count
from tests.support import models
from tests.support.draw import draw_latents, relative_error


def test_thirty_random_sizes_without_a_recompile(make_session):
    chooser = random.Random(0)
    sides = range(64, 265, 8)
    pipe, reference = models.one_width("sd15"), models.one_width("sd15")
    session = make_session("inductor")
    compile_pipe(pipe, session=session)
    draw_latents(pipe)
    draw_latents(pipe)
    kinds, recompiles = len(session.kinds), recompile_count()
    for seed in range(30):
        size = {
            "height_px": chooser.choice(sides),
            "width_px": chooser.choice(sides),
            "batch": chooser.randint(1, 3),
            "seed": seed,
        }
        # One step shows a sixteenth of the error that three show, and for three 1e-4 is enough.
        found, expected = (draw_latents(each, steps=1, **size) for each in (pipe, reference))
        assert relative_error(found, expected) < 5e-6
    assert len(session.kinds) == kinds
    assert recompile_count() == recompiles
    assert session.fallbacks() == []


_FIFTY_SIZES = """
import json, random, sys, torch
torch.set_num_threads(1)
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session
from tests.support import models
unet = models.one_width("sd15").unet
holder = type("Holder", (), {})()
holder.unet = unet
session = new_session({"backend": sys.argv[1], "build": "wait", "store": sys.argv[2]})
compile_pipe(holder, session=session)
chooser = random.Random(0)

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1])

sizes = [(48, 48)] + [(chooser.randint(2, 48), chooser.randint(2, 48)) for _ in range(50)]
memory = []
with torch.no_grad():
    for height, width in sizes:
        for _ in range(2):
            unet(**models.unet_inputs(unet, 2, height, width))
        memory.append(resident())
print(json.dumps({"memory": memory, "built": session.count("built"),
                  "loaded": session.count("loaded"), "kinds": len(session.kinds)}))
"""


def test_fifty_sizes_do_not_fill_the_memory(shared_store: Path, make_session):
    # Also the second process: everything is there by now, so it builds nothing.
    pipe = compile_pipe(models.one_width("sd15"), session=make_session("inductor"), ignores="vae")
    draw_latents(pipe)
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", _FIFTY_SIZES, "inductor", str(shared_store)],
        capture_output=True, text=True, cwd=root, timeout=300,
        env={**os.environ, "PATH": "", "CXX": "/nonexistent"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["built"] == 0
    assert seen["loaded"] == seen["kinds"] > 0
    after_five, last = seen["memory"][4], seen["memory"][-1]
    assert last < 1.1 * after_five, seen["memory"]
