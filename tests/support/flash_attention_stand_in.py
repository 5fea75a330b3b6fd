"""A stand-in for the package flash-attn-4, which runs on some GPUs only."""

from __future__ import annotations

import sys
from collections.abc import Callable
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

    def __call__(self, *arguments: Any) -> None:
        """Compute nothing."""

    def export_to_c(self, *, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_text(f"{function_name} {self.key}", encoding="utf-8")


class CompileCache:
    """As JITCache of flash_attn/cute/cache_utils.py: kernels by the library's keys."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __setitem__(self, key: Any, made: Any) -> None:
        self.cache[key] = made


class FlashAttentionStandIn:
    """What the library and its compiler do, computed by PyTorch.

    Attributes:
        compile_cache: As `_flash_attn_fwd.compile_cache` of the library's interface.
        compiled: The keys of kernels that were compiled, in order.
        loaded: Texts of the shared libraries that were loaded.
        loaded_objects: Texts of the object files that the compiler's package loaded.
        places: Where the loaded shared libraries were.
        calls: Queries, keys and values of each call of a loaded kernel, each [B, T, H, D].
        failure: Raised by the next calls of loaded kernels, if any.
        opened: Paths of libraries that were opened for all others.
        order: Which of query, key, value and output the library's kernel is called with.
        key_entries: Returns what else a kernel is compiled for, for a query [B, T, H, D].
        constants: Returns what else a kernel is called with, for a query [B, T, H, D].

    Args:
        folder: For what is on the disk of the compiler's package.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.runtime = folder / "nvidia_cutlass_dsl" / "cu13" / "lib" / "libruntime.so"
        self.runtime.parent.mkdir(parents=True)
        (folder / "nvidia_cutlass_dsl" / "__init__.py").touch()
        self.compile_cache = CompileCache()
        self.compiled: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []
        self.loaded_objects: list[str] = []
        self.places: list[Path] = []
        self.calls: list[tuple[torch.Tensor, ...]] = []
        self.failure: Exception | None = None
        self.opened: list[str] = []
        self.order = (0, 1, 2, 3)
        self.key_entries: Callable[[torch.Tensor], tuple[Any, ...]] = lambda q: ()
        self.constants: Callable[[torch.Tensor], tuple[Any, ...]] = lambda q: (None, (None, None))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float
    ) -> tuple[torch.Tensor, None]:
        """As `flash_attn_func` of flash_attn/cute/interface.py."""
        key = (str(q.dtype), q.shape[-1], *self.key_entries(q))
        if key not in self.compile_cache.cache:
            self.compiled.append(key)
            self.compile_cache.cache[key] = Compiled(key)
        out = torch.empty_like(q)
        # It detaches tensors, so these are other objects.
        detached = [tensor.detach() for tensor in (q, k, v, out)]
        arguments = (*(detached[n] for n in self.order), None, softmax_scale)
        self.compile_cache.cache[key](*arguments, *self.constants(q))
        return out, None

    def run(self, *arguments: Any) -> None:
        """As a loaded kernel."""
        q, k, v, out, _, scale, *rest = arguments
        assert rest == [None, (None, None)]
        if self.failure is not None:
            raise self.failure
        self.calls.append((q, k, v))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out.copy_(scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2))

    def load_module(self, path: str) -> dict[str, Any]:
        """As tvm_ffi.load_module."""
        assert path.endswith(".so")
        text = Path(path).read_text(encoding="utf-8")
        self.loaded.append(text)
        self.places.append(Path(path).readlink())
        return {text.split()[0]: self.run}

    def load_object(self, path: str, *, enable_tvm_ffi: bool) -> SimpleNamespace:
        """As cutlass.cute.runtime.load_module."""
        assert enable_tvm_ffi
        text = Path(path).read_text(encoding="utf-8")
        self.loaded_objects.append(text)
        return SimpleNamespace(**{text.split()[0]: self.run})

    def find_runtime_libraries(self, *, enable_tvm_ffi: bool) -> list[str]:
        """As that of cutlass.cute.runtime."""
        assert not enable_tvm_ffi
        return [str(self.runtime)]

    def install(self, monkeypatch: pytest.MonkeyPatch, *, keep: bool = False) -> None:
        """Have imports of the library and its compiler find this.

        Args:
            keep: Leave alone what cannot be imported now.
        """
        for name, content in {
            "flash_attn": {},
            "flash_attn.cute": {"flash_attn_func": self.attend},
            "flash_attn.cute.interface": {"_flash_attn_fwd": self},
            "cutlass": {},
            "cutlass.cute": {},
            "cutlass.cute.runtime": {
                "find_runtime_libraries": self.find_runtime_libraries,
                "load_module": self.load_object,
            },
            "tvm_ffi": {"load_module": self.load_module},
        }.items():
            if keep and sys.modules.get(name, self) is None:
                continue
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.syspath_prepend(str(self._folder))
