"""Counts the work beside the pictures: graphs, copies in 8 bits, looks at the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from onediff_ext.building.build_outcomes import BuildOutcomes
from onediff_ext.engine.blocks.block_tree import BlockTree
from onediff_ext.engine.cuda_graphs import staleness
from onediff_ext.engine.cuda_graphs.text_kv_graph import TextKvGraph
from onediff_ext.engine.quantization import QuantizedWeights
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.running.text_kv import BlockTextKv
from onediff_ext.engine.validity.module_attributes import ModuleAttributes
from onediff_ext.engine.validity.python_code import PythonCode
from onediff_ext.engine.validity.tensor_contents import TensorContents

_WORK: tuple[tuple[str, type | ModuleType, str], ...] = (
    ("graphs exported and built", BuildOutcomes, "store_built_graph"),
    ("copies in 8 bits", QuantizedWeights, "_make"),
    ("comparisons of weights", TensorContents, "_read"),
    ("blocks looked at", BlockRunner, "_prepare"),
    ("blocks read", BlockTree, "__init__"),
    ("attributes compared", ModuleAttributes, "hold"),
    ("code read", PythonCode, "_read"),
    ("keys and values of prompts", BlockTextKv, "_compute"),
    ("replays of keys and values", TextKvGraph, "_compute"),
    ("layouts of weights read", staleness, "_form_of"),
)


@contextmanager
def counted_work() -> Iterator[Counter[str]]:
    """Count within the ``with`` block, in all sessions."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for what, cls, name in _WORK:
            patch.setattr(cls, name, _counting(getattr(cls, name), what, counts))
        yield counts


def _counting(method: Any, what: str, counts: Counter[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[what] += 1
        return method(*args, **kwargs)

    return counted
