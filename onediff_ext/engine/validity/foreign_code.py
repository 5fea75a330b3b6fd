"""Code of another extension in a model: replaced methods, functions of torch, hooks and modes.

Extensions replace functions at run time. A graph must not contain such a function: the graph
would carry it into the next process.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onediff_ext.core.extension_names import extension_of_file

# Packages whose functions may be part of classes of other packages.
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
        *("_apply", "_init_weights", "set_attn_processor", "tie_weights"),
    }
)
_IGNORED_PREFIXES = ("load_", "_load", "save_", "_save", "from_", "push_", "register_", "named_")
_WITH_FUNC = (functools.partial, functools.partialmethod, functools.cached_property)
# Of `nn.Module` only what runs when a module is called.
CALLING = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
# Descriptors of compiled code.
_SLOTS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
    type(None),
)

# The functions of torch that compute. The names are torch's own, whatever replaced them since.
TORCH_OPERATORS = sorted(set(dir(torch._C._VariableFunctions)) & set(vars(torch)))


_TENSOR_BASE = torch.Tensor.__mro__[1]  # most operators are its; older torch: `_TensorBase`
# What functions of `torch.nn.functional` call by this name.
COMPILED_FUNCTIONS: Mapping[str, Any] = vars(torch._C._nn)
COMPILED_NAMES = sorted(name for name, value in COMPILED_FUNCTIONS.items() if callable(value))

MODULES_OF_FUNCTIONAL = sorted(
    name for name, v in vars(torch.nn.functional).items() if isinstance(v, types.ModuleType)
)


def functional_names() -> list[str]:
    """The names of the callables in `torch.nn.functional` now."""
    return [name for name, value in vars(torch.nn.functional).items() if callable(value)]


def defining_module(value: object) -> str:
    """Full name of the module that defines a callable, or the file that its code was taken from.

    A wrapper made by `functools.wraps` has its original's ``__module__``. Its globals name the
    module that it was written in. A decorator of torch, such as ``torch.no_grad()``, says nothing
    about the function that it wraps: that function counts.

    Args:
        value: A function, method, descriptor, class or callable object.

    Returns:
        The module's name; "" for compiled code.
    """
    value = written_function(value)
    globals_ = getattr(value, "__globals__", None)
    if isinstance(globals_, dict):
        return _other_file(value, globals_) or str(globals_.get("__name__", "?"))
    if isinstance(value, type):
        return value.__module__
    if isinstance(value, (types.BuiltinFunctionType, *_SLOTS)):
        return ""
    return type(value).__module__


def written_function(value: Any) -> Any:
    """The function that a callable runs in the end, without bindings and torch's decorators.

    Args:
        value: A function, method, descriptor, class or callable object.

    Returns:
        The function; `value` itself where it wraps none.
    """
    while True:
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, _WITH_FUNC):
            value = value.func
        elif isinstance(value, types.FunctionType) and _decorates(value):
            value = value.__wrapped__  # type: ignore[attr-defined]
        else:
            return value


def extension_of(value: object) -> str | None:
    """The extension, by its folder, that a callable or a class was written in, or its package.

    Args:
        value: A function, method, class or callable object.

    Returns:
        Such as ``"sd-webui-negpip"``; None for code of neither.
    """
    value = written_function(value)
    code = getattr(value, "__code__", None)
    if code is not None:
        return extension_of_file(code.co_filename)
    cls = value if isinstance(value, type) else type(value)
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return extension_of_file(path) if path else None


@functools.cache  # names of attributes are few
def is_called_by_no_forward(name: str) -> bool:
    """Whether a method of this name has nothing to do with what a module computes.

    Args:
        name: The method's name.
    """
    return name in _IGNORED or name.startswith(_IGNORED_PREFIXES)


def is_code(value: object) -> bool:
    """Whether an attribute of a class runs code when it is read or called.

    Args:
        value: From the class's ``__dict__``. A descriptor need not be callable, such as a property
            or a `functools.partialmethod`.
    """
    return callable(value) or hasattr(type(value), "__get__")


def is_ours(value: object) -> bool:
    """Whether this package defines the value's class.

    Args:
        value: Any object.
    """
    return type(value).__module__.startswith("onediff_ext.")


def patched_class_reason(cls: type, trusted: Sequence[str] = ()) -> str | None:
    """Say which method of a class comes from another extension, or None.

    Args:
        cls: Class of a block, a layer or an attention processor.
        trusted: Prefixes of modules whose patches are known.

    Returns:
        One line for people, or None when every method is the class's own.
    """
    for base in cls.__mro__[:-1]:
        names = CALLING if base is nn.Module else vars(base)
        own = base.__module__.partition(".")[0] + "."
        for name in names:
            method = vars(base).get(name)
            if method is None or is_called_by_no_forward(name):
                continue
            if not is_code(method):
                continue
            module = defining_module(method)
            if is_foreign(module, (own, *trusted)):
                return f"{cls.__qualname__} is patched by {module} ({name})"
    return None


def replaced_methods(module: object) -> dict[str, object]:
    """Return the methods that an instance overrides with attributes of its own, by name.

    Methods that no forward calls are left out. A class's method that was put back by hand counts
    as unchanged: some extensions do this. Of this package's own stand-ins counts what they
    have replaced, their attribute `replaced`.

    Args:
        module: An `nn.Module`, or another object with a ``__dict__``.
    """
    cls, found = type(module), {}
    for name, value in getattr(module, "__dict__", {}).items():
        if name == "_compiled_call_impl" and value is not None:  # `nn.Module` calls it instead
            if is_foreign(defining_module(value), ()):
                found[name] = value
            continue
        if not callable(value) or is_called_by_no_forward(name):
            continue
        if isinstance(value, nn.Module) or not callable(getattr(cls, name, None)):
            continue
        method = getattr(value, "replaced", None) if is_ours(value) else value
        if method is not None and not _is_own(method, module, name):
            found[name] = method
    return found


def is_own_method(module: object, name: str) -> bool:
    """Whether an instance attribute is the very method of the instance's class.

    Args:
        module: The instance.
        name: The attribute's name.
    """
    return _is_own(vars(module).get(name), module, name)


def replaced_torch_function_reason() -> str | None:
    """Say which function of torch comes from another extension, or None.

    Returns:
        One line for people that names the function and the module of its replacement; None when
        `torch`, `torch.nn.functional` and `torch.Tensor` are torch's own.
    """
    tables: tuple[tuple[str, Mapping[str, Any], Sequence[str]], ...] = (
        ("torch", vars(torch), TORCH_OPERATORS),
        ("torch.nn.functional", vars(torch.nn.functional), functional_names()),
        ("torch._C._nn", COMPILED_FUNCTIONS, COMPILED_NAMES),
        ("torch.Tensor", vars(torch.Tensor), list(vars(torch.Tensor))),
    )
    for owner, namespace, names in tables:
        for name in names:
            value = namespace.get(name)
            computes = callable(value) or (is_code(value) and hasattr(_TENSOR_BASE, name))
            if computes and is_foreign(module := defining_module(value), ()):
                return f"{owner}.{name} is replaced by {module}"
    return None


def global_hook_reason() -> str | None:
    """Say which global hook or torch mode of another extension is active, or None.

    These run around every module or operator, whatever the code of a module says.
    """
    module: Any = torch_module
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        return "a hook of another extension runs in all modules"
    bindings: Any = torch._C
    reason = transform_reason()
    if reason is not None:
        return reason
    if bindings._len_torch_function_stack() or bindings._len_torch_dispatch_stack():
        functions: Any = _get_current_function_mode_stack  # has no type hints
        modes = [*functions(), *_get_current_dispatch_mode_stack()]
        for mode in modes:
            if not (getattr(mode, "observes_only", False) or _is_known_mode(type(mode))):
                return f"a {type(mode).__qualname__} of another extension sees each operator"
    return None


def transform_reason() -> str | None:
    """Say which transform of torch sees the operators of this thread, or None.

    Tensors may be those of `torch.func`'s transforms, or carry tangents: a graph reads their
    memory, and knows nothing of what else they are. `torch.jit.trace` and `torch.onnx.export` write
    down operators: of a graph they would keep one call's numbers.
    """
    bindings: Any = torch._C
    if bindings._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "a transform of torch.func or forward-mode AD is active"
    return "torch.jit traces the model" if bindings._is_tracing() else None


def _decorates(function: types.FunctionType) -> bool:
    """Whether a function is what a decorator of torch has made of another one."""
    written_in = str(function.__globals__.get("__name__", ""))
    return written_in.startswith("torch.") and callable(getattr(function, "__wrapped__", None))


def _other_file(function: Any, globals_: Mapping[str, Any]) -> str | None:
    """The file that a function's code is from, if its ``__code__`` was replaced by another's."""
    own, code = globals_.get("__file__"), getattr(function, "__code__", None)
    if not isinstance(own, str) or code is None:
        return None
    file = code.co_filename
    if file.startswith("<") and not file.startswith(("<stdin", "<ipython")):
        return None  # code that was generated, as dataclasses do
    return None if _have_one_stem(file, own) else file


@functools.lru_cache(maxsize=8192)  # asked for each method of each class, and files are few
def _have_one_stem(file: str, other: str) -> bool:
    return PurePath(file).stem == PurePath(other).stem


def _is_own(method: object, module: object, name: str) -> bool:
    function = getattr(method, "__func__", None)
    is_bound_here = getattr(method, "__self__", None) is module
    return is_bound_here and function is not None and function is getattr(type(module), name, None)


def _is_known_mode(cls: type) -> bool:
    """Whether a mode is torch's (a default device, a profiler) or belongs to our exports."""
    return f"{cls.__module__}.".startswith(("torch.", "onediff_ext."))


def is_foreign(module: str, trusted: Sequence[str]) -> bool:
    """Whether a module is neither Python's, torch's, a known package's nor one of `trusted`.

    Args:
        module: The module's full name.
        trusted: Prefixes of modules that are known.
    """
    if not module or module.partition(".")[0] in _STANDARD:
        return False
    return not f"{module}.".startswith((*_TRUSTED, *trusted))
