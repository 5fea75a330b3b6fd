"""What identifies a machine where Linux's own files are missing, as on Windows."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onediff_ext.engine import machine

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def _digest(device: torch.device) -> str:
    return machine.machine_digest.__wrapped__(device)


@pytest.mark.parametrize("found", [("", ""), OSError(22, "Invalid argument", "python.exe")])
def test_a_system_without_a_named_c_library_counts_with_its_version(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, str] | OSError
) -> None:
    def libc_ver() -> tuple[str, str]:
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(platform, "libc_ver", libc_ver)
    digests = set()
    for version in ("10.0.22631", "10.0.26100", "10.0.26100"):
        monkeypatch.setattr(platform, "version", lambda version=version: version)
        digests.add(_digest(CPU))
    assert len(digests) == 2


class _Nvml:
    """Stands in for NVIDIA's management library."""

    version, error = b"580.65.06", 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlSystemGetDriverVersion(self, text: ctypes.Array, size: ctypes.c_uint) -> int:  # noqa: N802
        assert size.value == len(text)
        if not self.error:
            text.value = self.version
        return self.error

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> _Nvml:
    """A machine with a GPU whose system has no file about the driver."""
    nvml = _Nvml()
    monkeypatch.setattr(machine, "machine_entries", lambda *_: {})
    monkeypatch.setattr(machine, "Path", lambda path: Path("/missing") / path.lstrip("/"))
    monkeypatch.setattr(
        machine,
        "ctypes",
        SimpleNamespace(
            CDLL=lambda _: nvml,
            create_string_buffer=ctypes.create_string_buffer,
            c_uint=ctypes.c_uint,
        ),
    )
    return nvml


def test_the_driver_is_known_without_linuxs_file(nvml: _Nvml) -> None:
    before = _digest(GPU)
    assert _digest(GPU) == before
    nvml.version = b"591.44"
    assert _digest(GPU) != before


def test_a_driver_that_does_not_tell_is_unknown(
    nvml: _Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.error = 999
    silent = _digest(GPU)

    def missing(name: str) -> None:
        raise OSError(f"{name}: not found")

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    assert _digest(GPU) == silent


@pytest.mark.gpu
def test_the_management_library_names_the_version_of_linuxs_file() -> None:
    file = Path("/proc/driver/nvidia/version")
    if not file.exists():
        pytest.skip("needs Linux's file about the driver")
    version = machine._driver_version_of_nvml()
    assert version
    assert version in file.read_text(encoding="utf-8").split()
