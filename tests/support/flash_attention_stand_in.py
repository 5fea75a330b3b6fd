"""A stand-in for the package flash-attn-4, which runs on some GPUs only."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


class Compiled:
    """A compiled kernel, whose object file says for what it is."""

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.key = key

    def export_to_c(self, *, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_text(f"{function_name} {self.key}", encoding="utf-8")


class CompileCache:
    """As JITCache of flash_attn/cute/cache_utils.py: kernels by the library's keys."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, made: Any) -> None:
        self.cache[key] = made


class FlashAttentionStandIn:
    """What the library does, computed by PyTorch.

    Attributes:
        compile_cache: As `_flash_attn_fwd.compile_cache` of the library's interface.
        compiled: The keys of kernels that were compiled, in order.
        loaded: Texts of the object files that were loaded.
        calls: Queries, keys and values of each call, each [B, T, H, D].
        failure: Raised by the next calls, if any.
    """

    def __init__(self) -> None:
        self.compile_cache = CompileCache()
        self.compiled: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []
        self.calls: list[tuple[torch.Tensor, ...]] = []
        self.failure: Exception | None = None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float
    ) -> tuple[torch.Tensor, None]:
        """As `flash_attn_func` of flash_attn/cute/interface.py."""
        if self.failure is not None:
            raise self.failure
        self.calls.append((q, k, v))
        key = (str(q.dtype), q.shape[-1])
        if key not in self.compile_cache:
            self.compiled.append(key)
            self.compile_cache[key] = Compiled(key)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, scale=softmax_scale)
        return mixed.transpose(1, 2).contiguous(), None

    def load_module(self, path: str, *, enable_tvm_ffi: bool) -> Any:
        """As cutlass.cute.runtime.load_module."""
        assert enable_tvm_ffi
        text = Path(path).read_text(encoding="utf-8")
        self.loaded.append(text)
        return SimpleNamespace(**{text.split()[0]: "loaded"})

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have imports of the library find this."""
        for name, content in {
            "flash_attn": {},
            "flash_attn.cute": {"flash_attn_func": self.attend},
            "flash_attn.cute.interface": {"_flash_attn_fwd": self},
            "cutlass": {},
            "cutlass.base_dsl": {},
            "cutlass.cute": {},
            "cutlass.cute.runtime": {"load_module": self.load_module},
        }.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
