"""The form that graphs have on GPUs, on a CPU: what changes with torch's versions shows here too.

Kernels of our own are left out, and a CPU compiles C++ again at each load.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.fx.experimental._config as symbolic_config

from onediff_ext.backends.inductor import compiler_files
from onediff_ext.backends.inductor.standalone_artefact import build_artefact, load_artefact
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.export.exporter import export_block, input_fakes, load_program, save_program
from onediff_ext.engine.torch_versions import RELEASE
from tests.support.contract_blocks import BLOCKS, CPU

pytestmark = pytest.mark.skipif(
    RELEASE < (2, 8), reason=f"torch {torch.__version__} has no standalone_compile"
)

# A process that has not built it, as a WebUI is when it starts.
TRY_OUT = """
import sys
from pathlib import Path
from onediff_ext.backends.inductor import compiler_files
from onediff_ext.backends.inductor.standalone_artefact import load_artefact
from onediff_ext.building.worker.trial import try_out
from onediff_ext.engine.export.exporter import load_program
import torch

if files := compiler_files._files_of_this_process():
    files.take()
program, graph = (Path(path).read_bytes() for path in sys.argv[1:])
print(try_out(load_program(program), load_artefact(graph), torch.device("cpu")))
"""


def test_serves_other_sizes_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, make_block, make_inputs = BLOCKS["resnet"]
    block = make_block()
    tree = BlockTree(block, ("diffusers.",))
    call = family.bind(block, make_inputs(2, 8, 8), {})
    stored = save_program(export_block(tree.copy(), family, tree.names, tree.weights(), call, CPU))
    program = load_program(stored)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "building"))
    # Either process compiles its graph alone, but none of what all graphs of a run share. It leaves
    # nothing there: this form has a header of its own.
    if files := compiler_files._files_of_this_process.__wrapped__():
        files.take()
    with torch.no_grad(), symbolic_config.patch(use_duck_shape=False):
        graph = build_artefact(program.graph_module, input_fakes(program))
    (tmp_path / "program").write_bytes(stored)
    (tmp_path / "graph").write_bytes(graph)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "loading"))
    tried = subprocess.run(
        [sys.executable, "-c", TRY_OUT, str(tmp_path / "program"), str(tmp_path / "graph")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.split() == ["None"]


def test_a_load_starts_no_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels ask for a pool of processes as they are loaded; two threads load here."""
    from torch._inductor import CompiledArtifact, config
    from torch._inductor.async_compile import AsyncCompile

    started: list[object] = []
    both = threading.Barrier(2, timeout=0.2)

    def load(**_: object) -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()  # never: one at a time
        started.append(AsyncCompile.use_process_pool())
        return lambda *arguments: arguments

    monkeypatch.setattr(CompiledArtifact, "load", load)
    monkeypatch.setattr(AsyncCompile, "process_pool", lambda: pytest.fail("a pool was started"))
    threads = [threading.Thread(target=load_artefact, args=(b"",)) for _ in range(2)]
    with config.patch(compile_threads=4):  # pytest would take the setting away afterwards
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert started == [False, False]
        assert config.compile_threads == 4
