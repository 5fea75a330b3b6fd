"""Reads exported programs without the sizes that tracing noted for each tensor.

A compiler needs these; running the operators one by one does not. Making the symbols of all tensors
again is nine tenths of a load.
"""

from __future__ import annotations

import contextlib
import threading
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch._export.serde import serialize

_HINTS: dict[type, dict[str, Any]] = {}
_one_at_a_time = threading.RLock()  # sessions load in threads


@contextlib.contextmanager
def bare_programs() -> Iterator[None]:
    """Within the block, ``torch.export.load`` makes the same operators, without tensors' sizes.

    Other threads load as always.
    """
    with _one_at_a_time, pytest.MonkeyPatch.context() as patch:
        loads_here, whole = threading.get_ident(), serialize.GraphModuleDeserializer
        sizes_of = whole.deserialize_tensor_meta

        def none_here(reader: Any, entry: Any) -> Any:
            return None if threading.get_ident() == loads_here else sizes_of(reader, entry)

        # torch resolves the type hints of its schema again for each entry of a program.
        patch.setattr(
            serialize, "typing", SimpleNamespace(**{**vars(typing), "get_type_hints": _hints})
        )
        patch.setattr(whole, "deserialize_tensor_meta", none_here)
        patch.setattr(serialize.log, "disabled", True)  # it warns of symbols that nothing uses
        yield


def _hints(cls: type, **names: Any) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls, **names)
    return _HINTS[cls]
