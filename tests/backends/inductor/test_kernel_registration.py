"""Kernels are registered before a graph is rewritten to call them; needs no Triton."""

from __future__ import annotations

import importlib
import re
from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.backends.inductor import kernels
from onediff_ext.backends.inductor.kernels import rewrite

PACKAGE = "onediff_ext.backends.inductor.kernels"


def test_each_module_with_an_operator_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        f"{PACKAGE}.{path.name.removesuffix('.py')}": path.read_text(encoding="utf-8")
        for path in files(PACKAGE).iterdir()
        if path.name.endswith(".py")
    }
    imported: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", imported.append)
        kernels.register_kernels()
    operators = {
        name for name, text in sources.items() if re.search(r"^@(triton|custom)_op\(", text, re.M)
    }
    assert len(operators) >= 5
    assert set(imported) == operators


def test_a_rewrite_registers_the_kernels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(rewrite, "register_kernels", lambda: events.append("registered"))

    def replace(node: Any) -> None:
        events.append("rewritten")

    monkeypatch.setitem(rewrite._REWRITES, torch.ops.aten.layer_norm.default, replace)
    program = torch.export.export(nn.LayerNorm(8).eval(), (torch.randn(1, 2, 8),), strict=False)
    rewrite.with_kernels(program.graph_module)
    assert events == ["registered", "rewritten"]
