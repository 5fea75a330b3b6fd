"""Which Python modules a class's methods run code of directly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from onediff_ext.engine.blocks.key_text import source_digest
from onediff_ext.engine.running import kind_lookup
from onediff_ext.engine.validity.helper_functions import modules_named_by

SOURCES = {
    "fox_host": "",
    "fox_host.memory": "def free(): return 1",
    "fox_host.deep": "def deeper(x): return x",
    "fox_host.utils": """
from fox_host.deep import deeper
def clip(x): return deeper(x)
""",
    "fox_host.base": """
from torch import nn
class Base(nn.Module):
    def scale(self, x): return 2 * x
""",
    "fox_host.blocks": """
import math
import torch
from torch.nn import functional as F
from fox_host import memory
from fox_host.base import Base
from fox_host.utils import clip
from fox_host.unused import never
class Block(Base):
    def forward(self, x): return F.silu(clip(self.scale(x))) * math.pi * memory.free()
""",
    "fox_host.unused": "def never(): pass",
}


@pytest.fixture
def block() -> Iterator[type[nn.Module]]:
    order = ["fox_host", "fox_host.unused", *(n for n in SOURCES if "." in n and "unused" not in n)]
    try:
        for name in order:
            module = sys.modules[name] = ModuleType(name)
            exec(compile(SOURCES[name], f"<{name}>", "exec"), vars(module))
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)
        yield sys.modules["fox_host.blocks"].Block  # type: ignore[attr-defined]
    finally:
        for name in SOURCES:
            sys.modules.pop(name, None)


def test_the_class_its_bases_and_what_its_methods_name(block: type[nn.Module]) -> None:
    named = {"blocks", "base", "utils", "memory"}  # neither what `clip` calls nor `never`
    assert modules_named_by(block) == {f"fox_host.{name}" for name in named}


def test_a_replaced_function_of_a_module_changes_nothing(block: type[nn.Module]) -> None:
    """Jobs replace functions of a host's memory management."""
    memory: Any = sys.modules["fox_host.memory"]
    memory.free = lambda: 2
    assert "fox_host.memory" in modules_named_by(block)


def test_an_update_of_a_hosts_helper_is_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without a version is told by its files, so its stored graphs are found no more."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    host = tmp_path / "fox_host"
    host.mkdir()

    def entry() -> dict[str, str]:
        for name in [*filter(lambda name: name.startswith("fox_host"), sys.modules)]:
            monkeypatch.delitem(sys.modules, name)
        source_digest.cache_clear()
        importlib.invalidate_caches()
        block = importlib.import_module("fox_host.blocks").Block()
        return kind_lookup._helpers_entry(nn.Sequential(block))

    for name, source in SOURCES.items():
        leaf = name.rpartition(".")[2] if "." in name else "__init__"
        (host / f"{leaf}.py").write_text(source)
    first = entry()
    assert first == entry() != {}
    (host / "unused.py").write_text("def never(): return 3")
    assert entry() == first
    (host / "utils.py").write_text("def clip(x): return 0.5 * x")
    assert entry() != first


def test_torchs_own_classes_name_none() -> None:
    assert modules_named_by(nn.Conv2d) == frozenset()
