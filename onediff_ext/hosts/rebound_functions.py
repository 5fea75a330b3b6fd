"""Lets a traced copy of a host's module call other functions than its Python module names.

A host's block calls its attention by a global of its Python module. That global belongs to the
process: another thread may draw while a copy is traced. So the copy gets a forward of its own: the
same code, which reads globals of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn


def rebind_forwards(copy: nn.Module, package: str, functions: Mapping[str, Any]) -> None:
    """Make the modules of a copy call these functions.

    Args:
        copy: A structural copy (`BlockTree.copy`), never the live block. Its modules whose class
            lies in `package` get a forward of their own, and other methods where these read one
            of the names.
        package: The prefix of Python modules in which the names are replaced, such as
            ``"backend.nn."``. Functions there that a forward calls are replaced too, by name.
        functions: The new values of globals. Names that a Python module lacks are left out there.
    """
    namespaces = _Namespaces(package, functions)
    for module in copy.modules():
        cls = type(module)
        for name in dir(cls):
            member = inspect.getattr_static(cls, name)
            is_static = isinstance(member, staticmethod)
            function = member.__func__ if is_static else member
            if not isinstance(function, FunctionType) or not namespaces.owns(function):
                continue
            if name == "forward" or set(function.__code__.co_names) & set(functions):
                rebound = namespaces.rebound(function)
                vars(module)[name] = rebound if is_static else MethodType(rebound, module)


class _Namespaces:
    """One copy of each Python module's globals, so that functions still find each other."""

    def __init__(self, package: str, functions: Mapping[str, Any]) -> None:
        self._package, self._functions = package, functions
        self._copies: dict[int, dict[str, Any]] = {}

    def owns(self, function: FunctionType) -> bool:
        return str(function.__globals__.get("__name__", "")).startswith(self._package)

    def rebound(self, function: FunctionType) -> FunctionType:
        copied = FunctionType(
            function.__code__,
            self._copy(function.__globals__),
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        return copied

    def _copy(self, namespace: dict[str, Any]) -> dict[str, Any]:
        copied = self._copies.get(id(namespace))
        if copied is None:
            copied = self._copies[id(namespace)] = dict(namespace)
            for name, value in namespace.items():
                if name in self._functions:
                    copied[name] = self._functions[name]
                elif isinstance(value, FunctionType) and self.owns(value):
                    copied[name] = self.rebound(value)
        return copied
