"""Every text of the panel that a user reads: from its components, its HTML and its source."""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import onediff_ext
from onediff_ext.core.errors import OneDiffError
from onediff_ext.panel import html
from onediff_ext.panel.graph_rows import GraphGroup, age_text
from onediff_ext.panel.phrases import ENGLISH

_ROOT = Path(onediff_ext.__file__).parent
_REASON = re.compile(r"why_\w+|\w+_reason")


def texts_of(blocks: Any) -> Iterator[str]:
    """Labels, help, choices, placeholders and buttons of a gradio Blocks."""
    for block in blocks.blocks.values():
        for name in ("label", "info", "placeholder"):
            text = getattr(block, name, None)
            if isinstance(text, str) and text:
                yield text
        if type(block).__name__ == "Button" and block.value:
            yield block.value
        for choice in getattr(block, "choices", None) or ():
            yield choice[0] if isinstance(choice, tuple) else choice
        if type(block).__name__ == "HTML":
            yield from text_nodes(block.value)


def texts_of_html() -> Iterator[str]:
    """Texts of the panel's own HTML that are always the same."""
    yield from text_nodes(html.graph_table([], Path(), 1, ENGLISH))
    groups = [GraphGroup("{name}", "", ())]
    yield from text_nodes(html.graph_table(groups, Path("{root}"), 1, ENGLISH))
    yield from text_nodes(html.technical([]))
    yield age_text(time.time())


def text_nodes(source: str) -> Iterator[str]:
    """The text nodes of a piece of HTML, as a WebUI's localisation looks them up."""
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_data = found.append  # type: ignore[method-assign]
    parser.feed(source or "")
    parser.close()
    yield from filter(None, (text.strip() for text in found))


def messages_of(package: str) -> Iterator[str]:
    """Messages that do not depend on anything, from the source of a package's modules.

    They are what `html.message` shows, what errors say, and what functions named ``why_…`` or
    ``…_reason`` return.

    Args:
        package: Such as ``"panel"``; the packages in it are left out.
    """
    for path in sorted((_ROOT / package).glob("*.py")):
        module = importlib.import_module(f"onediff_ext.{package}.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield from _messages_of_call(node, module)
            elif isinstance(node, ast.FunctionDef) and _REASON.fullmatch(node.name):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return):
                        yield from _values(inner.value, module)


def _messages_of_call(call: ast.Call, module: ModuleType) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "message":
        yield from _values(call.args[0], module)
    made = getattr(module, name, None)
    if isinstance(made, type) and issubclass(made, OneDiffError):
        parts = [list(_values(argument, module)) for argument in call.args]
        if all(parts):
            yield str(made(*(part[0] for part in parts)))


def _values(expression: ast.expr | None, module: ModuleType) -> Iterator[str]:
    """The values of an expression that the module alone decides."""
    if isinstance(expression, ast.BoolOp):
        for value in expression.values:
            yield from _values(value, module)
    elif isinstance(expression, (ast.Constant, ast.JoinedStr)):
        code = compile(ast.Expression(expression), module.__name__, "eval")
        try:
            value = eval(code, vars(module))
        except NameError:
            return
        if isinstance(value, str):
            yield value
