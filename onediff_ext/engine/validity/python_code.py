"""The Python code that models run: their classes, the modules these are written in, torch itself.

Extensions replace functions at run time. A graph knows nothing of a function that was replaced
after it was traced, and one that was traced with it would hand it on to the next process.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onediff_ext.engine.validity.values import is_equal

# Packages whose functions may stand in classes of other packages.
_TRUSTED = ("torch.", "huggingface_hub.", "accelerate.", "peft.", "onediff_ext.")
_STANDARD = frozenset(
    {
        *("_abc", "_functools", "_operator", "abc", "builtins", "collections", "contextlib"),
        *("copy", "dataclasses", "enum", "functools", "importlib", "inspect", "itertools"),
        *("math", "operator", "types", "typing", "warnings", "weakref"),
    }
)
# Methods that no forward calls.
_IGNORED = frozenset(
    {
        *("__init__", "__init_subclass__", "__repr__", "__dir__", "__setstate__", "__getstate__"),
        *("__reduce__", "__del__", "to", "cpu", "cuda", "xpu", "half", "float", "double"),
        *("bfloat16", "train", "eval", "apply", "state_dict", "load_state_dict", "extra_repr"),
        *("requires_grad_", "zero_grad", "share_memory", "type", "compile", "reset_parameters"),
        *("_apply", "_init_weights", "set_attn_processor"),
    }
)
_KEPT_READINGS = 4
_IGNORED_BEGINNINGS = ("load_", "_load", "save_", "_save", "from_", "push_", "register_", "named_")
# Of `nn.Module` itself only what runs when a module is called.
_CALLING = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")

# Functions of torch that compute: the names are torch's own, whatever was replaced since.
_OPERATORS = sorted(set(dir(torch._C._VariableFunctions)) & set(vars(torch)))


# Descriptors of compiled code.
_SLOTS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
    type(None),
)


_names_read: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def home_of(value: object) -> str:
    """The full name of the module in which a callable was written, or "" if it is compiled code.

    A wrapper made by `functools.wraps` names its original's module as its own; its globals do not.
    """
    while True:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, (functools.partial, functools.cached_property)):
            value = value.func
        else:
            break
    globals_ = getattr(value, "__globals__", None)
    if isinstance(globals_, dict):
        return str(globals_.get("__name__", "?"))
    if isinstance(value, type):
        return value.__module__
    if isinstance(value, (types.BuiltinFunctionType, *_SLOTS)):
        return ""
    return type(value).__module__


def foreign_class(cls: type, trusted: Sequence[str] = ()) -> str | None:
    """Which method of a class somebody else has put there, in plain words, or None.

    Args:
        cls: Of a block, a layer or an attention processor.
        trusted: Beginnings of the names of modules whose patches are known.
    """
    for base in cls.__mro__[:-1]:
        names = _CALLING if base is nn.Module else vars(base)
        own = base.__module__.partition(".")[0] + "."
        for name in names:
            method = vars(base).get(name)
            if method is None or name in _IGNORED or name.startswith(_IGNORED_BEGINNINGS):
                continue
            if not (callable(method) or isinstance(method, (staticmethod, classmethod, property))):
                continue
            home = home_of(method)
            if _is_foreign(home, (own, *trusted)):
                return f"{cls.__qualname__} is patched by {home} ({name})"
    return None


def foreign_method(module: nn.Module, name: str) -> bool:
    """Whether an instance has a method of its own in the place of its class's, and not that put
    back by hand, as ControlNet for A1111 does when it is done."""
    method = module.__dict__.get(name)
    if method is None:
        return False
    return getattr(method, "__func__", None) is not getattr(type(module), name, None)


def foreign_methods(module: nn.Module) -> Iterator[str]:
    """The names of methods that an instance has replaced, except those that no forward calls."""
    cls = type(module)
    for name, value in module.__dict__.items():
        if name in _IGNORED or name.startswith(_IGNORED_BEGINNINGS) or not callable(value):
            continue
        if isinstance(value, nn.Module) or not callable(getattr(cls, name, None)):
            continue
        if not is_ours(value) and foreign_method(module, name):
            yield name


def reads_attribute(cls: type, name: str) -> bool:
    """Whether the code of a class names an attribute: others keep notes of theirs on modules."""
    if cls not in _names_read:
        functions = [
            value.__code__
            for base in cls.__mro__[:-1]
            if base is not nn.Module
            for value in vars(base).values()
            if isinstance(value, types.FunctionType)
        ]
        _names_read[cls] = frozenset(name for code in functions for name in code.co_names)
    return name in _names_read[cls]


def is_put_back(module: nn.Module, name: str) -> bool:
    """Whether an instance has the very method of its class as an attribute of its own."""
    function = getattr(module.__dict__.get(name), "__func__", None)
    return function is not None and function is getattr(type(module), name, None)


def is_ours(value: object) -> bool:
    """Whether this package put it there."""
    return type(value).__module__.startswith("onediff_ext.")


def _is_foreign(home: str, trusted: Sequence[str]) -> bool:
    if not home or home.partition(".")[0] in _STANDARD:
        return False
    return not f"{home}.".startswith((*_TRUSTED, *trusted))


class PythonCode:
    """Tells whether any code that models run has been replaced.

    Attributes:
        generation: Another number after each change; the old one where a change was taken back.
    """

    def __init__(self) -> None:
        self._classes: set[type] = set()
        self._getters: list[tuple[Mapping[str, Any], Callable[[Any], Any], int | None]] = []
        self._readings: dict[int, list[Any]] = {}  # by generation, the latest last
        self._moment: Hashable = None
        self._torch_reasons: dict[Sequence[str], str | None] = {}
        self._newest = self.generation = 0
        functional = torch.nn.functional
        self._add(vars(torch), _OPERATORS)
        self._add(vars(functional), [n for n, v in vars(functional).items() if callable(v)])
        self._add(vars(torch.Tensor), list(vars(torch.Tensor)), whole=True)
        self._readings[0] = self._read()

    def watch(self, classes: Iterable[type]) -> None:
        """Watch these classes too, their bases, and the functions of their modules."""
        new = {base for cls in classes for base in cls.__mro__[:-1]} - self._classes
        if not new:
            return
        self.look()
        modules = {base.__module__ for base in new} - {cls.__module__ for cls in self._classes}
        self._classes |= new
        for base in new:
            self._add(vars(base), list(vars(base)), whole=True)
        for name in modules:
            namespace = getattr(sys.modules.get(name), "__dict__", {})
            self._add(namespace, [n for n, v in namespace.items() if callable(v)])
        self._readings = {self.generation: self._read()}

    def look(self, moment: Hashable = None) -> int:
        """The generation now.

        Args:
            moment: Equal for calls between which nothing is replaced: one forward of a model.
        """
        if moment is None or moment != self._moment:
            found = self._read()
            if not is_equal(found, self._readings[self.generation]):
                self._torch_reasons.clear()
                self.generation = self._generation_of(found)
            self._moment = moment
        return self.generation

    def _generation_of(self, found: list[Any]) -> int:
        """That of an earlier reading where all is again what it was then, or a new one."""
        for generation, known in self._readings.items():
            if is_equal(found, known):
                return generation
        self._newest += 1
        self._readings[self._newest] = found
        while len(self._readings) > _KEPT_READINGS:
            del self._readings[next(iter(self._readings))]
        return self._newest

    def torch_reason(self, trusted: Sequence[str] = ()) -> str | None:
        """Which function of torch somebody has replaced, in plain words, or None."""
        key = tuple(trusted)
        if key not in self._torch_reasons:
            self._torch_reasons[key] = next(_replaced_functions(key), None)
        return self._torch_reasons[key]

    def _add(
        self, namespace: Mapping[str, Any], names: Sequence[str], *, whole: bool = False
    ) -> None:
        if names:
            getter = operator.itemgetter(*names)
            self._getters.append((namespace, getter, len(namespace) if whole else None))

    def _read(self) -> list[Any]:
        found: list[Any] = []
        for namespace, getter, whole in self._getters:
            try:
                found.append(getter(namespace))
            except KeyError:
                found.append(None)  # taken away
            if whole is not None:
                found.append(len(namespace))
        return found


def _replaced_functions(trusted: Sequence[str]) -> Iterator[str]:
    functional = vars(torch.nn.functional)
    tables = (
        ("torch", vars(torch), _OPERATORS),
        ("torch.nn.functional", functional, [n for n, v in functional.items() if callable(v)]),
        ("torch.Tensor", vars(torch.Tensor), list(vars(torch.Tensor))),
    )
    for owner, namespace, names in tables:
        for name in names:
            value = namespace.get(name)
            if callable(value) and _is_foreign(home := home_of(value), trusted):
                yield f"{owner}.{name} is replaced by {home}"


def surroundings_reason() -> str | None:
    """Why no module's code alone decides what it computes now, or None."""
    module: Any = torch_module
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        return "a hook of another extension runs in all modules"
    bindings: Any = torch._C
    if bindings._len_torch_function_stack() or bindings._len_torch_dispatch_stack():
        functions: Any = _get_current_function_mode_stack  # without types
        modes = [*functions(), *_get_current_dispatch_mode_stack()]
        for mode in modes:
            if not (getattr(mode, "observes_only", False) or _is_known_mode(type(mode))):
                return f"a {type(mode).__qualname__} of another extension sees each operator"
    return None


def _is_known_mode(cls: type) -> bool:
    """torch's own (a default device, a profiler), and those of our exports."""
    return f"{cls.__module__}.".startswith(("torch.", "onediff_ext."))
