"""Each reason why OneFlow is unavailable is one line, and another backend is used then."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from onediff_ext.backends.oneflow import availability
from onediff_ext.backends.registry import choose_backend, make_backend
from onediff_ext.hosts.diffusers.compile import new_session

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.version_info[:2] == (3, 10), reason="OneFlow may be installed here")
def test_another_python():
    reason = make_backend("oneflow").unavailable_reason(CPU)
    assert reason == "OneFlow 0.9.0 needs Python 3.10; this is " + ".".join(
        map(str, sys.version_info[:2])
    )


@pytest.mark.skipif(sys.version_info[:2] == (3, 10), reason="OneFlow may be installed here")
def test_the_usual_backend_draws_and_the_reason_is_shown(tmp_path):
    session = new_session({"backend": "oneflow", "store": tmp_path, "build": "never"})
    assert session.backend.name == "inductor"
    (fallback,) = session.fallbacks()
    assert fallback.what == "the oneflow backend"
    assert fallback.reason.startswith("OneFlow 0.9.0 needs Python 3.10; this is ")
    assert fallback.reason.endswith("; inductor builds the graphs")


def test_other_backends_are_taken_as_named():
    for name in ("inductor", "eager"):
        backend, reason = choose_backend(name)
        assert (backend.name, reason) == (name, None)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make packages look installed with a given version."""

    def install(name: str, version: str) -> None:
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    monkeypatch.syspath_prepend(tmp_path)
    return install


@pytest.mark.parametrize(
    ("package", "wanted", "version", "fits"),
    [
        ("oneflow", "0.9.0", "0.9.0", True),
        ("oneflow", "0.9.0", "0.9.0+cu117", True),
        ("oneflow", "0.9.0", "0.9.1.dev20240101", False),
        ("numpy", "1", "1.26.4", True),
        ("numpy", "1", "2.1.0", False),
        ("protobuf", "3.20", "3.20.3", True),
        ("protobuf", "3.20", "3.21.0", False),
        ("protobuf", "3.20", "5.29.1", False),
    ],
)
def test_versions(installed, package, wanted, version, fits):
    installed(package, version)
    reason = availability.version_reason(package, wanted)
    if fits:
        assert reason is None
    else:
        assert reason.startswith(f"OneFlow needs {package} {wanted}; {version} is installed (pip")
        assert "\n" not in reason


def test_a_package_that_is_missing():
    reason = availability.version_reason("no-such-package-at-all", "1")
    assert reason.startswith("OneFlow needs no-such-package-at-all 1, which is not installed")


@pytest.mark.parametrize(
    ("capability", "has_code"),
    [
        ((5, 2), False), ((6, 0), True), ((6, 1), True), ((7, 0), True), ((7, 2), True),
        ((7, 5), True), ((8, 0), True), ((8, 6), True), ((8, 9), True), ((9, 0), False),
        ((10, 0), False), ((12, 0), False),
    ],
)  # fmt: skip
def test_gpu_capabilities(capability, has_code):
    reason = availability.capability_reason(capability)
    assert (reason is None) == has_code
    if reason is not None:
        assert f"has no code for GPUs of capability {capability[0]}.{capability[1]}" in reason


def test_a_missing_library_is_named_with_its_package():
    error = ImportError("libcudnn_ops_infer.so.8: cannot open shared object file: No such file")
    assert availability.import_error_reason(error) == (
        "OneFlow needs the library libcudnn_ops_infer.so.8 "
        "(pip install --no-deps nvidia-cudnn-cu11==8.5.0.96)"
    )
    other = TypeError("Descriptors cannot be created directly.\nIf this call came from...")
    assert availability.import_error_reason(other) == (
        "OneFlow cannot be imported (TypeError: Descriptors cannot be created directly.)"
    )


_TEXT = "libcudnn_cnn_infer.so.8: cannot open shared object file: No such file or directory"
# Installed packages, the error from importing OneFlow, and the shown reason.
BROKEN = {
    "another OneFlow": ({"oneflow": "1.0.0"}, "", "OneFlow needs oneflow 0.9.0; 1.0.0 is inst"),
    "numpy 2": ({"numpy": "2.2.6"}, "", "OneFlow needs numpy 1; 2.2.6 is installed"),
    "protobuf": ({"protobuf": "5.29.1"}, "", "OneFlow needs protobuf 3.20; 5.29.1 is installed"),
    "a library": (
        {}, f"ImportError({_TEXT!r})", "OneFlow needs the library libcudnn_cnn_infer.so.8 (pip",
    ),
    "its import": (
        {}, "AttributeError('two\\nlines')", "OneFlow cannot be imported (AttributeError: two)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_whatever_is_wrong_the_usual_backend_draws(broken, installed, tmp_path, monkeypatch):
    """The line that a user reads for a set of installed packages, on any Python."""
    versions, error, expected = BROKEN[broken]
    for package, version in {
        "oneflow": "0.9.0", "numpy": "1.26.4", "protobuf": "3.20.3", **versions
    }.items():  # fmt: skip
        installed(package, version)
    (tmp_path / "oneflow").mkdir()
    (tmp_path / "oneflow/__init__.py").write_text(f"raise {error or 'AssertionError'}\n")
    monkeypatch.delitem(sys.modules, "oneflow", raising=False)
    monkeypatch.setattr(availability, "PYTHON", sys.version_info[:2])
    availability.process_reason.cache_clear()
    try:
        session = new_session({"backend": "oneflow", "store": tmp_path, "build": "never"})
    finally:
        availability.process_reason.cache_clear()
    assert session.backend.name == "inductor"
    (fallback,) = session.fallbacks()
    assert fallback.reason.startswith(expected)
    assert fallback.reason.endswith("; inductor builds the graphs")
    assert "\n" not in fallback.reason


def test_a_gpu_without_code_is_a_reason(monkeypatch):
    monkeypatch.setattr(availability, "process_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = make_backend("oneflow").unavailable_reason(torch.device("cuda"))
    assert reason.startswith("OneFlow 0.9.0 has no code for GPUs of capability 9.0, only 6.0, ")
    assert "\n" not in reason


def test_a_wheel_without_its_libraries(flow, run_apart, tmp_path):
    """The real import, from a folder without NVIDIA's libraries."""
    packages = Path(flow.__file__).parents[1]
    for entry in packages.iterdir():
        if entry.name not in ("nvidia", "oneflow"):
            (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "oneflow").mkdir()
    for entry in (packages / "oneflow").iterdir():
        target = tmp_path / "oneflow" / entry.name
        if entry.name.startswith("_oneflow_internal"):
            shutil.copy(entry, target)  # its libraries are looked for beside it
        else:
            target.symlink_to(entry)
    (tmp_path / "nvidia").mkdir()
    for entry in (packages / "nvidia").iterdir():
        if entry.name not in ("cublas", "cudnn") or (entry / "lib" / "libcudnn.so.9").exists():
            (tmp_path / "nvidia" / entry.name).symlink_to(entry)
    code = """
import sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [sys.argv[1]]
from onediff_ext.backends.oneflow.availability import process_reason
print(process_reason())
"""
    reason = run_apart(code, tmp_path).splitlines()[-1]
    assert reason.startswith("OneFlow needs the library libcu")
    assert "pip install --no-deps nvidia-cu" in reason
