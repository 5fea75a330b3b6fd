"""Text of a block's classes, hyper-parameters and source for the key of its kind.

Stored graphs are found by this text: equal blocks give equal text in every process, and no
change of the code here may change it.
"""

from __future__ import annotations

import functools
import hashlib
import numbers
import sys
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onediff_ext.engine.object_attributes import attributes_of
from onediff_ext.engine.validity.foreign_code import defining_module, is_ours

_PLAIN = (type(None), bool, int, float, str, torch.dtype, bytes, range, slice)
# Packages whose numbers print all of their digits.
_NUMBERS_OF = ("builtins", "numpy", "fractions", "decimal")
# Where a block lies and which modules it has is told elsewhere.
_TOLD_ELSEWHERE = (torch.device, torch.layout, torch.memory_format, nn.Module)
_DEPTH = 3


def qualified_name(cls: type) -> str:
    """Return ``"module.Class"``.

    Args:
        cls: Any class.
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of the text's SHA-256.

    Args:
        text: Hashed as UTF-8.
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def source_digest(module_name: str) -> str:
    """Return the digest of a Python module's file.

    Args:
        module_name: Full name of a module that is imported.

    Returns:
        16 hexadecimal digits; "" for torch, which the key has by version; "none" for a module
        without a file.
    """
    if module_name.startswith("torch."):
        return ""
    path = getattr(sys.modules.get(module_name), "__file__", None)
    return digest(Path(path).read_text(encoding="utf-8")) if path else "none"


def follows_from_padding(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is what torch computes from a convolution's padding.

    A padding that wraps around or reflects is done with the computed values.

    Args:
        module: Any module.
        name: Of its attribute.
    """
    if name != "_reversed_padding_repeated_twice":
        return False
    layer: Any = module
    if layer.padding_mode == "zeros":
        return True  # nothing reads them
    if isinstance(layer.padding, str):
        return False
    computed = [cells for cells in reversed(layer.padding) for _ in range(2)]
    return list(vars(layer)[name]) == computed


def describe(value: object, depth: int = 0, untold: list[str] | None = None) -> str:
    """Return text that is equal for equal hyper-parameters; it contains no address.

    Args:
        value: An attribute of a module.
        depth: How many objects `value` is nested in; attributes of deeper ones are left out.
        untold: Gets the class of each part that another one of the class may stand for in the same
            text. None drops them. The caller judges modules and functions that are attributes
            themselves.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "(" + ",".join(_part(v, depth, untold) for v in value) + ")"
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=_by_name)
        return "{" + ",".join(f"{k}={_part(v, depth, untold)}" for k, v in pairs) + "}"
    if isinstance(value, type):
        return qualified_name(value)
    if callable(value) and hasattr(value, "__qualname__") and hasattr(value, "__module__"):
        return f"{value.__module__}.{value.__qualname__}"
    name = qualified_name(type(value))
    if isinstance(value, (set, frozenset)):
        return f"{name}({','.join(sorted(_part(v, depth, untold) for v in value))})"
    if isinstance(value, numbers.Number) and type(value).__module__ in _NUMBERS_OF:
        return f"{name}({value})"
    if isinstance(value, _TOLD_ELSEWHERE):
        return name
    attributes = None if isinstance(value, torch.Tensor) else attributes_of(value)
    if attributes is not None and depth < _DEPTH:
        return name + describe(attributes, depth + 1, untold)
    if untold is not None:
        untold.append(name)
    return name


def _part(value: object, depth: int, untold: list[str] | None) -> str:
    """Describe what an attribute holds."""
    if isinstance(value, nn.Module) or not says_all_by_name(value):
        name = qualified_name(type(value))
        if untold is not None:
            untold.append(name)
        return name
    return describe(value, depth, untold)


def says_all_by_name(value: object) -> bool:
    """Whether a callable computes what its name and its own attributes say.

    A closure, a method and a partial function compute with values besides.

    Args:
        value: Any object; of one that cannot be called nothing is left unsaid.
    """
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    if isinstance(value, types.BuiltinFunctionType):  # also a method of a list or a dict
        return isinstance(value.__self__, (type(None), types.ModuleType))
    return not isinstance(value, (functools.partial, types.MethodType))


def is_untold_function(
    value: object, module: nn.Module, name: str, packages: Sequence[str]
) -> bool:
    """Return whether an attribute may be called, and a kind's key does not say what it computes.

    Modules and methods are judged elsewhere.

    Args:
        value: What the attribute holds.
        module: Whose attribute it is.
        name: Its name.
        packages: Prefixes of the modules whose functions the key names, besides torch's.
    """
    if not isinstance(value, types.FunctionType):
        is_judged = isinstance(value, nn.Module) or callable(getattr(type(module), name, None))
        # A class, such as a host's choice of layers, is named in the key as a function is.
        if not callable(value) or isinstance(value, type) or is_judged or is_ours(value):
            return False
    if not says_all_by_name(value):
        return True
    home = defining_module(value)
    return bool(home) and not f"{home}.".startswith(("builtins.", "torch.", *packages))


def _by_name(item: tuple[Any, Any]) -> str:
    return str(item[0])
