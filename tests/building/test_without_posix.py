"""The whole way from a block to its graph where the system lacks what Windows lacks.

Names are taken away in the process that draws, once diffusers is imported, and in its workers from
their start. What Windows does otherwise (files that cannot be removed while they are open) is not
imitated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TAKE_AWAY = """
import os, signal, subprocess, sys
for module in ("fcntl", "resource", "termios"):
    sys.modules[module] = None
for name in ("fork", "forkpty", "getpgid", "killpg", "memfd_create", "nice", "setpgid", "setsid"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGALRM", "SIGUSR1", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
"""

IN_WORKERS = """
import sys
if any(word.endswith("start_worker.py") for word in sys.orig_argv):
    import take_away
"""

DRAW = """
import os, sys
from pathlib import Path
from tests.support import models
pipe = models.one_width("sd15")  # few kinds: each is built by a worker, and all loaded twice
import take_away
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
    site = tmp_path / "site"
    site.mkdir()
    (site / "take_away.py").write_text(TAKE_AWAY, encoding="utf-8")
    (site / "sitecustomize.py").write_text(IN_WORKERS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
            "TMPDIR": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr
    assert "drawn" in done.stdout
    assert not list(tmp_path.glob("onediff-build-*"))
