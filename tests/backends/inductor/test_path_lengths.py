"""Paths of builds on Windows, which allows 260 characters where long paths are not switched on.

The names of folders are those that this package makes. The names below them are Triton's and
Inductor's, as far as they are long.
"""

from __future__ import annotations

from pathlib import Path, PureWindowsPath

import pytest
import torch

from onediff_ext.backends.inductor.aot_library import build_library
from onediff_ext.backends.inductor.standalone_artefact import cuda_config
from onediff_ext.building.build_folder import BuildFolder
from onediff_ext.building.worker_surroundings import worker_environment
from onediff_ext.core.errors import BackendError
from onediff_ext.store.default_root import default_root
from onediff_ext.store.folder import StoreFolder

MAX_PATH = 259  # and a zero byte
MAX_FOLDER = 247  # room for a file of 8 letters, a dot and 3 more
USER = "x" * 20  # Windows allows no longer names of users
LOCAL = PureWindowsPath(rf"C:\Users\{USER}\AppData\Local")
KEY = "k" * 52  # of Triton, of Inductor's caches and of its files: SHA-256 in base 32
PART = "tmp.pid_4194304_00000000-0000-0000-0000-000000000000"  # Triton's, while it writes
FILE = "__grp__{}.json"  # Triton's longest name for a kernel's file
# The begin of a name that Inductor gave on an H200 (benchmarks/results/dit-profile-h200.json).
DESCRIPTIVE = "triton_poi_fused__scaled_dot_product_cudnn_attention__to_copy_add_mean_mul_pow_rsqrt"


@pytest.fixture
def below_temp(tmp_path: Path) -> dict[str, PureWindowsPath]:
    """The folders of a build worker's compilers on Windows, by their environment variables."""
    build = BuildFolder(tmp_path)
    scratch = build.path / "worker-12345678"  # as `tempfile.mkdtemp` names it
    found = worker_environment(build.path, scratch, tmp_path / "compiler-files")
    build.remove()
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMP")
    return {
        name: LOCAL / "Temp" / PureWindowsPath(*Path(found[name]).relative_to(tmp_path).parts)
        for name in names
    }


def test_kernels_have_short_names_on_windows_alone() -> None:
    assert cuda_config("linux") == {
        name: value
        for name, value in cuda_config("win32").items()
        if name != "triton.descriptive_names"
    }
    assert not cuda_config("win32")["triton.descriptive_names"]


@pytest.mark.parametrize(
    ("kernel", "fits"),
    [("triton_per__999", True), ("cross_attention_kernel", True), (DESCRIPTIVE, False)],
)
def test_tritons_files(below_temp: dict[str, PureWindowsPath], kernel: str, fits: bool) -> None:
    in_worker = below_temp["TRITON_CACHE_DIR"]
    in_process = LOCAL / "Temp" / f"torchinductor_{USER}" / "triton" / "0"
    for folder in (in_worker, in_process):
        path = folder / KEY / PART / FILE.format(kernel)
        assert (len(str(path)) <= MAX_PATH) is fits


def test_inductors_files(
    below_temp: dict[str, PureWindowsPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest paths of builds for a CPU and for a GPU (torch 2.13)."""
    asked: dict[str, str] = {}

    def aot_compile(graph_module: object, inputs: object, *, options: dict[str, str]) -> None:
        asked.update(options)

    monkeypatch.setattr("torch._inductor.aot_compile", aot_compile)
    with pytest.raises(BackendError):
        build_library(torch.fx.GraphModule({}, torch.fx.Graph()), [])
    cache = below_temp["TORCHINDUCTOR_CACHE_DIR"]
    folder = cache / asked["aot_inductor.output_path"] / KEY / f"{KEY}.weights_CxxBuild"
    assert len(str(folder)) <= MAX_FOLDER
    assert len(str(cache / KEY / KEY / f"{KEY}.weights_CxxBuild")) > MAX_FOLDER  # its usual name
    assert len(str(cache / "fxgraph" / "kk" / f"f{KEY}" / (64 * "s"))) <= MAX_PATH


def test_the_stores_files() -> None:
    root = default_root({"LOCALAPPDATA": "local"}, "win32")
    assert root.parts == ("local", "onediff-ext")
    folder = StoreFolder(root)
    token = f"4194304-{16 * 'f'}"
    longest = (
        folder.aside / "graphs" / f"{64 * 'd'}.graph",
        folder.aside / "locks" / f"write-{token}.lock",
        folder.aside / "compiler-files" / (32 * "d") / f"{KEY}.h.gch.{64 * 's'}",
    )
    for path in longest:
        assert len(str(LOCAL / PureWindowsPath(*path.relative_to("local").parts))) <= MAX_PATH
