"""Public functions say their arguments, what they return and which errors they raise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "onediff_ext"
_SECTION = r"^{}:\n((?:[ \t]+.*\n|\n)*)"
_FILLER = r"^[ ]{4}(\w+): The \1\.$"
_EXEMPT_DECORATORS = ("property", "cached_property", "setter", "overload")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def last_name(node: ast.expr) -> str:
    """Return the last name of an expression: "ABC" for `abc.ABC` and for `ABC[int]`."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def section(docstring: str, title: str) -> str | None:
    """Return the text below a title, or None without such a section."""
    found = re.search(_SECTION.format(title), docstring + "\n", re.MULTILINE)
    return None if found is None else found[1]


def named_in(text: str) -> set[str]:
    """Return the names that a section explains: `a, b: ...` gives a and b.

    "block: The block." explains nothing.
    """
    text = re.sub(_FILLER, "", text, flags=re.MULTILINE)
    heads = re.findall(r"^[ ]{4}([*\w.]+(?:, [*\w.]+)*):", text, re.MULTILINE)
    return {name.lstrip("*") for head in heads for name in head.split(", ")}


def argument_names(function: Function, is_method: bool) -> list[str]:
    """Return the names of a function's arguments without `self` and private ones."""
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    if is_method and "staticmethod" not in map(last_name, function.decorator_list):
        names = names[1:]
    names += [a.arg for a in (*args.kwonlyargs, args.vararg, args.kwarg) if a is not None]
    return [n for n in names if not n.startswith("_")]


def raised_directly(function: Function) -> Iterator[str]:
    """Yield the classes of the errors that a function's own body makes and raises."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = last_name(node.exc)
            if name[:1].isupper() and name != "NotImplementedError":
                yield name
        waiting.extend(ast.iter_child_nodes(node))


def says_result(function: Function, docstring: str) -> bool:
    """Whether a docstring tells the result of a function that has one."""
    result = "" if function.returns is None else ast.unparse(function.returns)
    if result in ("", "None", "NoReturn", "Never", "Iterator[None]", "Generator[None]"):
        return True
    has_section = any(section(docstring, t) is not None for t in ("Returns", "Yields"))
    return has_section or re.match(r"(Return|Whether|Yield)\b", docstring) is not None


def missing_parts(function: Function, is_method: bool) -> list[str]:
    """Return what the docstring of a function lacks, in words."""
    docstring = ast.get_docstring(function)
    if not docstring:
        return ["docstring"]
    names = argument_names(function, is_method)
    known = named_in(section(docstring, "Args") or "")
    missing = [f"argument {n}" for n in names if n not in known]
    if names and not says_result(function, docstring):
        missing.append("result")
    # `torch.OutOfMemoryError` and a name that was imported from there are the same.
    told = {name.rpartition(".")[2] for name in named_in(section(docstring, "Raises") or "")}
    return missing + [f"error {e}" for e in sorted(set(raised_directly(function)) - told)]


def documented_methods() -> dict[str, set[str]]:
    """Return the methods with a docstring of each class in onediff_ext, by the class's name."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, Function)]
                documented = {m.name for m in methods if ast.get_docstring(m)}
                found.setdefault(node.name, set()).update(documented)
    return found


def problems_of_class(node: ast.ClassDef, documented: dict[str, set[str]]) -> Iterator[str]:
    """Yield "line name: what is missing" for each public method of a class."""
    bases = [last_name(b) for b in node.bases]
    if "Protocol" in bases:
        return
    inherited = set().union(*(documented.get(b, set()) for b in bases))
    for method in node.body:
        if not isinstance(method, Function):
            continue
        if method.name == "__init__":
            known = named_in(section(ast.get_docstring(node) or "", "Args") or "")
            lacks = [n for n in argument_names(method, True) if n not in known]
            missing = [f"argument {n}" for n in lacks]
        elif (
            method.name.startswith("_")
            or method.name in inherited
            or any(last_name(d) in _EXEMPT_DECORATORS for d in method.decorator_list)
        ):
            continue
        else:
            missing = missing_parts(method, True)
        if missing:
            yield f"{method.lineno} {node.name}.{method.name}: {', '.join(missing)}"


def problems_of_package(package: str) -> list[str]:
    """Return "file:line name: what is missing" for each public function of a package."""
    documented = documented_methods()
    problems = []
    for path in sorted((PACKAGE / package).rglob("*.py")):
        found: list[str] = []
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if getattr(node, "name", "_").startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                found += problems_of_class(node, documented)
            elif isinstance(node, Function) and (missing := missing_parts(node, False)):
                found.append(f"{node.lineno} {node.name}: {', '.join(missing)}")
        problems += [f"{path.relative_to(ROOT).as_posix()}:{problem}" for problem in found]
    return problems


@pytest.mark.parametrize("package", ["engine", "session", "store"])
def test_public_functions_are_documented(package: str) -> None:
    problems = problems_of_package(package)
    assert not problems, "\n" + "\n".join(problems)
