"""The extension that some code belongs to, by the folder it lies in."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from onediff_ext.core.extension_names import (
    extension_of_file,
    extension_of_module,
    module_in_reason,
)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/webui/extensions/sd-webui-negpip/scripts/negpip.py", "sd-webui-negpip"),
        ("C:\\webui\\extensions\\sd-webui-negpip\\scripts\\negpip.py", "sd-webui-negpip"),
        ("/webui/extensions-builtin/hypertile/hypertile.py", "hypertile"),
        ("/venv/lib/python3.11/site-packages/tomesd/patch.py", "tomesd"),
        # An extension's own packages belong to it.
        ("/webui/extensions/one/venv/site-packages/two/a.py", "one"),
        ("/webui/modules/sd_hijack.py", None),
        ("extensions", None),
        ("<string>", None),
        ("", None),
    ],
)
def test_by_file(path: str, name: str | None) -> None:
    assert extension_of_file(path) == name


def test_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("negpip_lib")
    module.__file__ = "/webui/extensions/sd-webui-negpip/negpip_lib/__init__.py"
    monkeypatch.setitem(sys.modules, "negpip_lib", module)
    assert extension_of_module("negpip_lib.attention", lambda _: None) == "sd-webui-negpip"
    # A WebUI does not list its scripts among Python's modules.
    found = {"onediff_probe.py": "/webui/extensions/probe/scripts/onediff_probe.py"}
    assert extension_of_module("onediff_probe.py", found.get) == "probe"
    assert extension_of_module("nobody", found.get) is None


@pytest.mark.parametrize(
    ("reason", "module"),
    [
        ("Linear is patched by onediff_probe.py, which is not known here", "onediff_probe.py"),
        ("GEGLU is patched by lib_x.patch (forward)", "lib_x.patch"),
        ("attn1 holds a function of a_b.c (scale)", "a_b.c"),
        ("attention is replaced by tomesd.", "tomesd"),
        ("a hypernetwork changes the context", None),
    ],
)
def test_the_module_that_a_reason_names(reason: str, module: str | None) -> None:
    assert module_in_reason(reason) == module
