"""Load a graph that was built for one GPU onto another GPU of the same type.

Inductor writes the number of the build GPU into the graph's code and into its kernels' launch
data. Kernels are the same for all GPUs of a type, so only these numbers are replaced.

Source: CompiledFxGraph.after_deserialization in torch/_inductor/output_code.py,
TritonBundler.load_autotuners in torch/_inductor/triton_bundler.py (torch 2.8 to 2.13).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Places in the code around the kernels. Kernel sources do not change: caches use them as keys.
_PLACES = (
    (re.compile(r"(_DeviceGuard\()\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"(set_device\()\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"(get_raw_stream\()\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"(\bdevice\(type='cuda', index=)\d+(\))"), r"\g<1>{}\g<2>"),
    (re.compile(r"('cuda:)\d+(')"), r"\g<1>{}\g<2>"),
)


def for_device(source: str, index: int) -> str:
    """Return the Python code of a compiled graph for the GPU with this number."""
    for pattern, replacement in _PLACES:
        source = pattern.sub(replacement.format(index), source)
    return source


@contextmanager
def loading_for(index: int) -> Iterator[None]:
    """Load this thread's graphs for the GPU with this number, within this ``with`` block.

    Two threads must not enter it at the same time.
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
    """Set the launch device of a kernel that has not been launched yet."""
    kernel.device_props = kernel.device_props._replace(index=index)
    kernel.triton_meta = {**kernel.triton_meta, "device": index}
    for result in kernel.compile_results:
        result.compile_meta = {**result.compile_meta, "device": index}
