"""Main memory that can be used, in containers too."""

from __future__ import annotations

from pathlib import Path

import pytest

from onediff_ext.hosts import main_memory
from onediff_ext.hosts.main_memory import limits_of_cgroups, main_memory_available

GB = 2**30


def group(
    folder: Path, limit: str, used_bytes: int, cache_bytes: int = 0, version: int = 2
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current", "")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    (folder / names[0]).write_text(f"{limit}\n", encoding="utf-8")
    (folder / names[1]).write_text(f"{used_bytes}\n", encoding="utf-8")
    files = f"{names[2]}active_file {cache_bytes // 4}\n"
    files += f"{names[2]}inactive_file {cache_bytes - cache_bytes // 4}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{files}slab 7\n", encoding="utf-8")


@pytest.fixture
def process(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def test_each_group_around_the_process_counts(tmp_path: Path, process: Path) -> None:
    process.write_text("0::/system/docker/abc\n", encoding="utf-8")
    group(tmp_path / "system", f"{30 * GB}", 10 * GB)
    group(tmp_path / "system" / "docker", "max", 10 * GB)
    group(tmp_path / "system" / "docker" / "abc", f"{16 * GB}", 9 * GB, 2 * GB)
    assert limits_of_cgroups(process, tmp_path) == [9 * GB, 20 * GB]


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path, process: Path) -> None:
    process.write_text("0::/system/docker/abc\n")  # as the machine names it
    group(tmp_path, f"{16 * GB}", 9 * GB)
    assert limits_of_cgroups(process, tmp_path) == [7 * GB]


def test_the_first_version(tmp_path: Path, process: Path) -> None:
    process.write_text("9:cpu,cpuacct:/a\n4:memory:/a\n1:name=systemd:/a\n", encoding="utf-8")
    group(tmp_path / "memory" / "a", f"{8 * GB}", 9 * GB, GB // 2, version=1)
    group(tmp_path / "memory", f"{2**63 - 4096}", 20 * GB, version=1)
    assert limits_of_cgroups(process, tmp_path)[0] == 0


@pytest.mark.parametrize("text", ["", "0::/\n", "0::/gone\n", "4:memory:/x\n"])
def test_without_a_limit(tmp_path: Path, process: Path, text: str) -> None:
    process.write_text(text, encoding="utf-8")
    assert limits_of_cgroups(process, tmp_path) == []
    assert limits_of_cgroups(tmp_path / "none", tmp_path) == []


def test_the_least_counts(tmp_path: Path, process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main_memory_available() > 2**28
    process.write_text("0::/\n", encoding="utf-8")
    group(tmp_path, "5000", 1000)
    monkeypatch.setattr(main_memory, "_PROCESS", process)
    monkeypatch.setattr(main_memory, "_CGROUPS", tmp_path)
    assert main_memory_available() == 4000
