"""Loading a graph that was built for one GPU onto another one of the same kind.

Inductor writes the number of the GPU that a graph was built for into its code and into what its
kernels need to be launched. Kernels are the same for all GPUs of a kind, so only these numbers
are exchanged. Source: CompiledFxGraph.after_deserialization in torch/_inductor/output_code.py,
TritonBundler.load_autotuners in torch/_inductor/triton_bundler.py (torch 2.8 to 2.13).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# In the code around the kernels. Their own sources stay as they are: they name what is cached.
_PLACES = (
    (re.compile(r"(_DeviceGuard\()\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"(set_device\()\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"(get_raw_stream\()\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"(\bdevice\(type='cuda', index=)\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"('cuda:)\d+(')"), r"\g<1>{}\g<2>"),
)


def for_device(source: str, index: int) -> str:
    """The Python code of a compiled graph, for the GPU with this number."""
    for pattern, replacement in _PLACES:
        source = pattern.sub(replacement.format(index), source)
    return source


@contextmanager
def loading_for(index: int) -> Iterator[None]:
    """Within it, graphs that this thread loads are for the GPU with this number.

    Must not be entered by two threads at the same time.
    """
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.triton_bundler import TritonBundler

    thread = threading.get_ident()
    own_load = CompiledFxGraph.after_deserialization
    own_autotuners: Any = vars(TritonBundler)["load_autotuners"]

    def after_deserialization(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and isinstance(graph.source_code, str):
            graph.source_code = for_device(graph.source_code, index)
            graph.cache_key = f"{graph.cache_key}g{index}"  # names the file and the module
        return own_load(graph, *args, **kwargs)

    def load_autotuners(cls: Any, autotuners: Any, *args: Any, **kwargs: Any) -> Any:
        names = own_autotuners.__func__(cls, autotuners, *args, **kwargs)
        if threading.get_ident() == thread:
            for one in autotuners or ():
                _move(one.kernel, index)
        return names

    bundler: Any = TritonBundler
    graphs: Any = CompiledFxGraph
    graphs.after_deserialization = after_deserialization
    bundler.load_autotuners = classmethod(load_autotuners)
    try:
        yield
    finally:
        graphs.after_deserialization = own_load
        bundler.load_autotuners = own_autotuners


def _move(kernel: Any, index: int) -> None:
    """Have a kernel that was not launched yet be launched on this GPU."""
    kernel.device_props = kernel.device_props._replace(index=index)
    kernel.triton_meta = {**kernel.triton_meta, "device": index}
    for result in kernel.compile_results:
        result.compile_meta = {**result.compile_meta, "device": index}
