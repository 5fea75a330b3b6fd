"""Wrappers that an extension left on a module's method, and whether they pass calls through now.

HyperTile, for one, never takes away the wrappers that it has put on attention layers. While it is
off, their guard sends each call to the layer's own method:

    def wrapper(*args, **kwargs):
        if not params.enabled:
            return params.forward(*args, **kwargs)
        ...

Such a guard is read from the source, and evaluated again before each use of a graph. It counts only
if the source compiles to the very code of the wrapper, the guard reads plain values without calling
anything, and the method that it returns to is that of the module's class.
"""

from __future__ import annotations

import ast
import functools
import tokenize
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from onediff_ext.engine.validity.foreign_code import replaced_methods

_PLAIN = (bool, int, float, str, type(None))
_GETTERS: tuple[object, ...] = (object.__getattribute__, types.ModuleType.__getattribute__)
_MOST_WRAPPERS = 4  # around one method


class _NotPlainError(Exception):
    """A guard reads something that cannot be read without running code of the extension."""


class LeftWrapper:
    """A wrapper whose first statement is a guard that passes the call through.

    Args:
        module: The module that it was left on.
        name: Name of the method that it replaces.
        wrapper: The function.
        guard: Its first statement.
    """

    def __init__(
        self, module: nn.Module, name: str, wrapper: types.FunctionType, guard: ast.If
    ) -> None:
        self._module, self._name, self._wrapper = module, name, wrapper
        self._test = guard.test
        returned: Any = guard.body[0]
        self._target: ast.expr = returned.value.func

    @classmethod
    def of(cls, module: nn.Module, name: str, function: object) -> LeftWrapper | None:
        """Read a function that stands in a method's place.

        Args:
            module: The module that it was left on.
            name: Name of the method that it replaces.
            function: What stands in the method's place.

        Returns:
            The wrapper; None when the function has no guard that can be read.
        """
        if not isinstance(function, types.FunctionType):
            return None
        guard = _guard_of(function.__code__)
        return None if guard is None else cls(module, name, function, guard)

    def passes(self, depth: int = 0) -> bool:
        """Return whether a call now does nothing but run the class's own method.

        A guard may pass the call to another wrapper, which is asked in turn. A guard that cannot be
        read without running code of the extension does not pass.

        Args:
            depth: How many wrappers lie around this one; at most four are followed.
        """
        try:
            names = _names_of(self._wrapper)
            if not _value(self._test, names):
                return False
            target = _look_up(self._target, names)
        except _NotPlainError:
            return False
        own = getattr(type(self._module), self._name, None)
        if isinstance(target, types.MethodType):
            return target.__func__ is own and target.__self__ is self._module
        below = LeftWrapper.of(self._module, self._name, target)
        return below is not None and depth < _MOST_WRAPPERS and below.passes(depth + 1)


def left_wrappers(
    module: nn.Module, replaced: Mapping[str, object] | None = None
) -> dict[str, LeftWrapper]:
    """Return the guarded wrappers on a module's methods, by the method's name.

    Args:
        module: A module of a host's model.
        replaced: From `replaced_methods`, where it is known already.
    """
    if replaced is None:
        replaced = replaced_methods(module)
    found = {name: LeftWrapper.of(module, name, method) for name, method in replaced.items()}
    return {name: wrapper for name, wrapper in found.items() if wrapper is not None}


@functools.lru_cache(maxsize=64)
def _guard_of(code: types.CodeType) -> ast.If | None:
    """The guard at the beginning of a function's source, or None."""
    node = _definition_of(code)
    if node is None:
        return None
    arguments, body = node.args, node.body
    others = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    if others or arguments.vararg is None or arguments.kwarg is None:
        return None
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # behind the docstring
    guard = body[0] if body else None
    if not isinstance(guard, ast.If) or not isinstance(guard.body[0], ast.Return):
        return None
    call = guard.body[0].value
    if not isinstance(call, ast.Call):
        return None
    forwarded = f"(*{arguments.vararg.arg}, **{arguments.kwarg.arg})"
    return guard if ast.unparse(call) == f"{ast.unparse(call.func)}{forwarded}" else None


def _definition_of(code: types.CodeType) -> ast.FunctionDef | None:
    """The definition in the source file that compiles to exactly this code, or None."""
    try:
        with tokenize.open(code.co_filename) as file:
            tree = ast.parse(file.read())
        module = compile(tree, code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, UnicodeError, RecursionError):
        return None
    if code not in _codes(module):
        return None  # the file has changed since it was imported
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _names_of(function: types.FunctionType) -> Mapping[str, Any]:
    """The values of a function's free variables, before those of its module."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        free = {name: cell.cell_contents for name, cell in cells}
    except ValueError:  # one is not assigned yet
        raise _NotPlainError from None
    return ChainMap(free, function.__globals__)  # no copy: this runs at each call of a block


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a condition, of a plain type."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, names)
    if isinstance(node, ast.BoolOp):
        values = (_value(each, names) for each in node.values)
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _value(node.left, names), _value(node.comparators[0], names)
        if isinstance(node.ops[0], (ast.Eq, ast.Is)):
            return left == right
        if isinstance(node.ops[0], (ast.NotEq, ast.IsNot)):
            return left != right
        raise _NotPlainError
    value = node.value if isinstance(node, ast.Constant) else _look_up(node, names)
    if type(value) not in _PLAIN:
        raise _NotPlainError
    return value


def _look_up(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The object that a name, or attributes of it, stand for."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute):
        return _attribute(_look_up(node.value, names), node.attr)
    raise _NotPlainError


def _attribute(owner: Any, name: str) -> Any:
    """An attribute that is read without running code: no property, no ``__getattr__``."""
    cls = type(owner)
    if cls.__getattribute__ not in _GETTERS:
        raise _NotPlainError
    of_class = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    if hasattr(type(of_class), "__set__"):
        raise _NotPlainError
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    if of_class is None and not any(name in vars(base) for base in cls.__mro__):
        raise _NotPlainError
    if hasattr(type(of_class), "__get__"):
        raise _NotPlainError
    return of_class
