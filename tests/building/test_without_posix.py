"""The whole way from a block to its graph where the system lacks what Windows lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.without_posix import environment_of_workers

ROOT = Path(__file__).resolve().parents[2]

# A script as users write it: without `if __name__ == "__main__"`.
DRAW = """
import multiprocessing, os, sys
from pathlib import Path
with open(sys.argv[2], "a", encoding="utf-8") as file:
    file.write(f"{__name__}\\n")
def runs_the_script_again(process):  # on Windows, for each process of multiprocessing
    raise AssertionError(process)
multiprocessing.process.BaseProcess.start = runs_the_script_again
from tests.support import models
pipe = models.one_width("sd15")  # few kinds: each is built by a worker, and all loaded twice
from tests.support.without_posix import take_away
take_away()
assert not hasattr(os, "fork") and sys.modules["fcntl"] is None
from onediff_ext.core.options import CompileOptions
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session
from tests.support.draw import draw_latents, relative_error

expected = draw_latents(pipe)
options = {"backend": "eager", "store": Path(sys.argv[1]), "workers": 1, "build": "wait"}
for source in ("built", "loaded"):
    session = new_session(CompileOptions.parse(options))
    compile_pipe(pipe, session=session)
    draw_latents(pipe)
    assert relative_error(draw_latents(pipe), expected) < 1e-4
    states = {kind.label: (kind.state, kind.reason) for kind in session.kinds}
    assert {state for state, _ in states.values()} == {KindState.READY}, states
    assert session.count(source) == len(session.kinds), source
    session.close()
print("drawn")
"""


def test_graphs_are_built_stored_and_loaded(tmp_path: Path) -> None:
    site, script, runs = tmp_path / "site", tmp_path / "script.py", tmp_path / "runs"
    site.mkdir()
    script.write_text(DRAW, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), str(runs)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={
            **os.environ,
            **environment_of_workers(site),
            "TMPDIR": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr
    assert "drawn" in done.stdout
    assert runs.read_text(encoding="utf-8") == "__main__\n"  # a worker does not run it again
    assert not list(tmp_path.glob("onediff-build-*"))
