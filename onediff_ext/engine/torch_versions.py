"""Differences between torch versions, down to 2.1.

All other code is written for the newest torch and takes such things from here.
docs/torch-versions.md lists the versions and what was run on them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

_NAME = torch.__version__.partition("+")[0]  # "2.6.0" of "2.6.0+cu124"
_MAJOR, _MINOR, *_ = _NAME.split(".")
RELEASE = (int(_MAJOR), int(_MINOR))

# A class of `torch.cuda` before 2.5.
OutOfMemoryError: type[RuntimeError] = (
    torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError
)


def _no_dynamo() -> bool:
    return False


# True only where Dynamo traces the call, for `torch.compile` or a strict `torch.export`. In Python
# it is False, also while another thread is traced, which `is_compiling` does not promise.
is_dynamo_tracing: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", _no_dynamo)

# The oldest release whose `torch.export` makes programs of blocks with dynamic sizes.
OLDEST_FOR_GRAPHS = (2, 6)


def too_old_for_graphs(needed: tuple[int, int] = OLDEST_FOR_GRAPHS) -> str | None:
    """Say in one line why this torch builds no graphs and what a newer one brings, or None.

    Args:
        needed: The oldest release that builds them, as (major, minor).

    Returns:
        A reason for people, with two measured speed-ups; None when this torch is new enough.
    """
    if needed <= RELEASE:
        return None
    # Medians from benchmarks/results. A test compares the text with these files.
    return (
        f"torch {_NAME} draws eager, captured on a GPU; graphs need {needed[0]}.{needed[1]} or"
        " newer: on an H200 they ran SD1.5's UNet 1.6 times as fast as captured, SDXL's VAE 4.2"
        " times as fast as eager"
    )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on this type of device, or None when it is off.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or another of torch's. Before torch 2.4 others are off.
    """
    if RELEASE >= (2, 4):
        enabled = torch.is_autocast_enabled(device_type)
        return torch.get_autocast_dtype(device_type) if enabled else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return None


def set_cuda_autocast(enabled: bool, dtype: torch.dtype) -> tuple[bool, torch.dtype]:
    """Set autocast for CUDA without entering a context.

    Needs torch 2.4, as exports do.

    Args:
        enabled: Whether autocast is on.
        dtype: The dtype that it casts to.

    Returns:
        `enabled` and `dtype` from before.
    """
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    return before


def cudnn_attention_enabled() -> bool:
    """Return whether attention may use cuDNN's kernel; False before torch 2.2."""
    enabled = getattr(torch.backends.cuda, "cudnn_sdp_enabled", None)
    return enabled is not None and bool(enabled())


def fp16_accumulation() -> bool | None:
    """Return whether float16 products accumulate in float16; None before torch 2.7, without the
    option."""
    if RELEASE < (2, 7):  # not by hasattr, for which 2.1 raises an AssertionError
        return None
    return bool(torch.backends.cuda.matmul.allow_fp16_accumulation)


def float32_settings() -> tuple[Hashable, ...]:
    """Return what decides how float32 is computed: for the whole, and from torch 2.9 by library.

    None stands for a setting that cannot be read: torch 2.9 refuses to say an older setting where
    the newer ones do not fit it.
    """
    newer = _FLOAT32_BY_LIBRARY if RELEASE >= (2, 9) else ()
    return tuple(_value_or_none(read) for read in (*_FLOAT32, *newer))


def _value_or_none(read: Callable[[], Hashable]) -> Hashable:
    try:
        return read()
    except RuntimeError:
        return None


_backends: Any = torch.backends
_FLOAT32: tuple[Callable[[], Hashable], ...] = (
    lambda: torch.get_float32_matmul_precision(),
    lambda: bool(_backends.cudnn.allow_tf32),
)
_FLOAT32_BY_LIBRARY: tuple[Callable[[], Hashable], ...] = (
    lambda: str(_backends.cudnn.fp32_precision),
    lambda: str(_backends.cudnn.conv.fp32_precision),
    lambda: str(_backends.cuda.matmul.fp32_precision),
)


def end_recording_to_pool(device_index: int, pool: Any) -> None:
    """Stop allocations into the memory pool of a CUDA graph whose recording failed.

    Args:
        device_index: Index of the GPU.
        pool: Id of the pool.

    Raises:
        RuntimeError: No allocations go there.
    """
    bindings: Any = torch._C
    if hasattr(bindings, "_cuda_endAllocateToPool"):
        bindings._cuda_endAllocateToPool(device_index, pool)
        return
    try:  # 2.3 to 2.6; the stream of a failed recording is still the current one
        bindings._cuda_endAllocateCurrentStreamToPool(device_index, pool)
    except TypeError:  # 2.1
        bindings._cuda_endAllocateCurrentStreamToPool(device_index)


def dynamic_dim(name: str, least: int, most: int) -> Any:
    """Return a dim for `torch.export` that is symbolic between inclusive bounds.

    torch 2.6 takes bounds only for named dims, of which equal names are one symbol.

    Args:
        name: Name of the dim in torch 2.6.
        least, most: The bounds.
    """
    automatic: Any = torch.export.Dim.AUTO
    if callable(automatic):
        return automatic(min=least, max=most)
    return torch.export.Dim(name, min=least, max=most)


def ready_for_standalone_compile(graph_module: torch.fx.GraphModule) -> None:
    """Repair an exported graph for `standalone_compile` before torch 2.11.

    `standalone_compile` looks for the fake tensor mode at the outputs only. Without one it makes
    a second mode, and then rejects the graph's own tensors for having two modes. A loaded program
    also keeps values of products of symbols, which it takes for symbols.

    Args:
        graph_module: Of an exported program; changed in place.
    """
    if RELEASE >= (2, 11):
        return
    output = next(iter(reversed(graph_module.graph.nodes)))
    for node in output.args[0]:
        fake = node.meta["example_value"] = node.meta["val"]
        known = fake.fake_mode.shape_env.var_to_val
        for expression in [e for e in known if not e.is_Symbol]:
            del known[expression]


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Export without what nobody reads.

    torch 2.6 warns of the layers of a block that is deliberately no submodule. Newer ones write
    the Python stack beside each operator, which takes time, and paths of this machine. torch also
    keeps each operator's result for the next call with the same sizes. Symbolic sizes differ at
    nearly every call, so next to nothing is found there.
    """
    with (
        warnings.catch_warnings(),
        _setting("torch.fx.config", "do_not_emit_stack_traces", True),
        _setting("torch._dynamo.config", "fake_tensor_cache_enabled", False),
    ):
        warnings.filterwarnings("ignore", "Unable to find the path of the module")
        yield


@contextlib.contextmanager
def _setting(module: str, name: str, value: bool) -> Iterator[None]:
    """Give one of torch's settings a value within the block, where this torch has it."""
    try:
        config = importlib.import_module(module)
    except ImportError:
        yield
        return
    before = getattr(config, name, None)  # missing from older versions
    try:
        if before is not None:
            setattr(config, name, value)
        yield
    finally:
        if before is not None:
            setattr(config, name, before)


@functools.cache
def keep_device_guard() -> None:
    """Make a thread that never ends the first user of ``FakeTensorMode``, where torch needs that.

    A CUDA build of torch without a GPU registers an object of the first thread that uses the mode,
    for all threads. After that thread has ended, the next use ends the process (seen with 2.11).
    Exports and loads run in threads that end.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is None or torch.version.cuda is None or torch.cuda.is_available():
        return
    registered = threading.Event()

    def stay() -> None:
        ensure()
        registered.set()
        threading.Event().wait()

    threading.Thread(target=stay, name="onediff-device-guard", daemon=True).start()
    registered.wait()
