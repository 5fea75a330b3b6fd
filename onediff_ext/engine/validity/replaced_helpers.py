"""Which global of a Python module was replaced from outside, such as a patched helper function.

A replaced helper may keep state, which a graph would freeze, and a graph that was traced with it
would carry it into the next process. What a module's own source says is compared with what its
globals hold now.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from onediff_ext.engine.validity.foreign_code import defining_module, is_foreign

# How a module's source binds a name: ("import", module, attribute), ("def", "", "") or other ways.
_Binding = tuple[str, str, str]


def replaced_helper_reason(
    namespace: Mapping[str, Any], names: Sequence[str], trusted: Sequence[str] = ()
) -> str | None:
    """Say which global of a Python module comes from another extension, or None.

    Args:
        namespace: The module's globals.
        names: Of those that count.
        trusted: Prefixes of modules whose patches are known.

    Returns:
        One line for people with the names of both modules. None when each global is what the
        module's own source makes it, or when the source is unavailable.
    """
    module, file = str(namespace.get("__name__", "")), str(namespace.get("__file__", ""))
    own = module.partition(".")[0] + "."
    for name in names:
        value = namespace.get(name)
        home = _home(value)
        if not is_foreign(home, (own, *trusted)) and not isinstance(value, types.SimpleNamespace):
            continue
        if _home_is_standard(home, value) or _is_bound_so(module, file, name, value):
            continue
        return f"{module}.{name} is replaced by {home}"
    return None


def _home(value: object) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    return defining_module(value)


def _home_is_standard(home: str, value: object) -> bool:
    if isinstance(value, types.SimpleNamespace):
        return False
    return home.partition(".")[0] in sys.stdlib_module_names


def _is_bound_so(module: str, file: str, name: str, value: object) -> bool:
    """Whether a module's source may have given a name this value."""
    bindings = _bindings(module, file)
    if bindings is None or "*" in bindings:
        return True  # nothing is known
    for kind, source, attribute in bindings.get(name, ()):
        if kind == "other":
            return True
        if kind == "import":
            origin = sys.modules.get(source)
            if origin is None:
                continue
            inner = f"{source}.{attribute}"
            expected = getattr(origin, attribute, sys.modules.get(inner)) if attribute else origin
            if expected is value:
                return True
    return False


@functools.lru_cache(maxsize=256)
def _bindings(
    module: str,
    file: str,  # noqa: ARG001
) -> Mapping[str, Sequence[_Binding]] | None:
    """How a module's source binds each of its globals; None without a source.

    Args:
        module: Its name.
        file: Where it is. Another module of this name may be loaded later.
    """
    try:
        spec = importlib.util.find_spec(module)
        source = spec.loader.get_source(module) if spec and spec.loader else None  # type: ignore[attr-defined]
        if source is None:
            return None
        tree = ast.parse(source)
    except (AttributeError, ImportError, SyntaxError, ValueError):
        return None
    is_package = bool(spec and spec.submodule_search_locations is not None)
    package = module if is_package else module.rpartition(".")[0]
    found: dict[str, list[_Binding]] = {}
    for node in ast.walk(tree):
        for name, binding in _bound_by(node, package):
            found.setdefault(name, []).append(binding)
    return found


def _bound_by(node: ast.AST, package: str) -> list[tuple[str, _Binding]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        decorated = "other" if node.decorator_list else "def"
        return [(node.name, (decorated, "", ""))]
    if isinstance(node, ast.Import):
        return [
            (alias.asname, ("import", alias.name, ""))
            if alias.asname
            else (alias.name.partition(".")[0], ("import", alias.name.partition(".")[0], ""))
            for alias in node.names
        ]
    if isinstance(node, ast.ImportFrom):
        relative = "." * node.level + (node.module or "")
        source = importlib.util.resolve_name(relative, package) if node.level else relative
        return [(a.asname or a.name, ("import", source, a.name)) for a in node.names]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [(node.id, ("other", "", ""))]
    return []
