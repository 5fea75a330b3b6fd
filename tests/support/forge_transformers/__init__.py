"""Small transformers (DiT) with the names, signatures and habits of Forge's and Neo's own.

Each file stands for one Python module of the host's ``backend.nn`` and is imported under its name,
since these blocks call functions of their module.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FILES = {
    "forge": {
        "backend.nn.flux": "forge_flux.py",
        "backend.nn.chroma": "forge_chroma.py",
        "backend.nn.mmditx": "forge_mmditx.py",
    },
    "neo": {
        "comfy_kitchen": "comfy_kitchen.py",
        "backend.nn.flux": "neo_flux.py",
        "backend.nn.lumina": "neo_lumina.py",
        "backend.nn.qwen": "neo_qwen.py",
        "backend.nn.anima": "neo_anima.py",
    },
    "reforge": {},
}
"""The file of each Python module, by host."""


def import_transformers(host: str) -> dict[str, ModuleType]:
    """Import a host's transformers; its layers and attention must be there already.

    Args:
        host: ``"forge"``, ``"neo"`` or ``"reforge"``.

    Returns:
        The Python modules by full name, which are in `sys.modules` now.
    """
    imported = {}
    for name, file in _FILES[host].items():
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = imported[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    return imported
