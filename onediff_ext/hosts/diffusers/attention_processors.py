"""Attention processors of diffusers, and the backend that they dispatch attention to."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Hashable
from typing import Any

import torch

NATIVE = "native"  # torch's own scaled_dot_product_attention
_DISPATCH = "diffusers.models.attention_dispatch"
_REGISTRY = "_AttentionBackendRegistry"  # its table of functions
_SETTING = "_attention_backend"  # of a processor; None means the active backend


def processor_eager_reason(attention: Any, pure: Collection[str]) -> str | None:
    """Return why a layer's attention processor keeps its block eager, or None.

    Args:
        attention: The layer, or None.
        pure: Full names of processors that are pure functions of their arguments.
    """
    if attention is None:
        return None
    processor = attention.processor
    cls = type(processor)
    if f"{cls.__module__}.{cls.__name__}" not in pure:
        return f"attention processor {cls.__qualname__} is not known as pure"
    # Another attribute of a processor would be a setting that no graph knows.
    if vars(processor).keys() - {_SETTING}:
        return f"attention processor {cls.__name__} has settings"
    return None


def backend_eager_reason(attention: Any) -> str | None:
    """Return why the backend of a layer's attention keeps its block eager, or None.

    Args:
        attention: The layer, or None.
    """
    processor = None if attention is None else attention.processor
    if not hasattr(type(processor), _SETTING):  # it calls torch's own kernel
        return None
    chosen = getattr(processor, _SETTING)
    name = active_backend() if chosen is None else _told(_name(chosen))
    return None if name == NATIVE else f"attention runs with the backend {name}"


def active_backend() -> str:
    """Return the name of the backend that processors without a backend of their own dispatch to.

    It is a setting of the whole process: ``diffusers.models.attention_dispatch.attention_backend``,
    or ``$DIFFUSERS_ATTN_BACKEND``. Where another function stands for the native one, the name says
    so.
    """
    registry = getattr(sys.modules.get(_DISPATCH), _REGISTRY, None)
    return NATIVE if registry is None else _told(_name(registry._active_backend))


def dispatch_setting() -> Hashable:
    """Return a value that differs when processors dispatch attention to another function."""
    module = sys.modules.get(_DISPATCH)
    registry = getattr(module, _REGISTRY, None)
    if module is None or registry is None:
        return NATIVE
    functions = [_lookup(registry), *registry._backends.values()]
    codes = tuple([(each, getattr(each, "__code__", None)) for each in functions])
    return active_backend(), module.torch is torch, codes


def foreign_backend_reason(processor: object) -> str | None:
    """Return why a processor dispatches attention to code of another extension, or None.

    Such code may keep state, which a CUDA graph would freeze.

    Args:
        processor: Of an attention layer.
    """
    module = sys.modules.get(_DISPATCH)
    registry = getattr(module, _REGISTRY, None)
    if module is None or registry is None or not hasattr(type(processor), _SETTING):
        return None
    chosen = getattr(processor, _SETTING)
    name = _name(registry._active_backend if chosen is None else chosen)
    functions = [registry._backends.get(module.AttentionBackendName(name))]
    functions += [_lookup(registry)] if chosen is None else []
    package = os.path.dirname(os.path.dirname(module.__file__ or ""))
    is_own = all(_place(function)[0].startswith(package + os.sep) for function in functions)
    if is_own and module.torch is torch:
        return None
    return f"attention runs with the backend {name}, as another extension has it"


def use_native_backend(block: Any) -> None:
    """Make the attention of a copied block call torch's own kernel, whatever backend is active."""
    module = sys.modules.get(_DISPATCH)
    if module is None:
        return
    for layer in block.modules():
        processor = vars(layer).get("processor")
        if hasattr(type(processor), _SETTING):
            setattr(processor, _SETTING, module.AttentionBackendName(NATIVE))


def _told(name: str) -> str:
    """A backend's name, and whether another function than diffusers' own stands for it.

    The table of functions and its lookup are no names in a module, which the engine watches. So it
    does not see what the functions read either: the kernel, from the module's own ``torch``.
    """
    return f"{name}, as another extension has it" if name == NATIVE and not _is_own() else name


def _is_own() -> bool:
    module = sys.modules.get(_DISPATCH)
    registry, own = getattr(module, _REGISTRY, None), getattr(module, "_native_attention", None)
    if module is None or registry is None or own is None:
        return True  # of another version; then its name is all that is known
    written = ((own, "_native_attention"), (_lookup(registry), "get_active_backend"))
    return (
        module.torch is torch
        and registry._backends.get(module.AttentionBackendName(NATIVE)) is own
        and all(_place(function) == (module.__file__, name) for function, name in written)
    )


def _lookup(registry: Any) -> Any:
    """The function that finds the active backend's."""
    return getattr(vars(registry).get("get_active_backend"), "__func__", None)


def _place(function: Any) -> tuple[str, str]:
    """The file and the name that a function's code was compiled with."""
    code = getattr(function, "__code__", None)
    return getattr(code, "co_filename", ""), getattr(code, "co_name", "")


def _name(backend: Any) -> str:
    name: str = getattr(backend, "value", backend)
    return name
