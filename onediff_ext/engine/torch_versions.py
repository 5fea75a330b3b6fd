"""What torch lacks or names otherwise in older versions, down to 2.1.

Whoever needs such a thing takes it from here, so that all else is written for the newest torch.
docs/torch-versions.md says what was run on which version.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_NAME = torch.__version__.partition("+")[0]  # "2.6.0" of "2.6.0+cu124"
_MAJOR, _MINOR, *_ = _NAME.split(".")
RELEASE = (int(_MAJOR), int(_MINOR))

# A class of `torch.cuda` before 2.5.
OutOfMemoryError: type[RuntimeError] = (
    torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else torch.cuda.OutOfMemoryError
)

# The oldest release whose `torch.export` makes programs of blocks with dynamic sizes.
OLDEST_FOR_GRAPHS = (2, 6)


def too_old_for_graphs(needed: tuple[int, int] = OLDEST_FOR_GRAPHS) -> str | None:
    """Why this torch builds no graphs and what a newer one brings, in one line; None if it does.

    Args:
        needed: The oldest release that builds them.
    """
    if needed <= RELEASE:
        return None
    # Medians of benchmarks/results; a test holds them against the files.
    return (
        f"torch {_NAME} draws eager, captured on a GPU; graphs need {needed[0]}.{needed[1]}, with"
        " which an H200 ran SD1.5's UNet 1.6 times as fast as captured, SDXL's VAE 4.2 times as"
        " fast as eager"
    )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes with on this kind of device, or None when it is off."""
    if RELEASE >= (2, 4):
        enabled = torch.is_autocast_enabled(device_type)
        return torch.get_autocast_dtype(device_type) if enabled else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return None


def cudnn_attention_enabled() -> bool:
    """Whether attention may take cuDNN's kernel, which it could not before 2.2."""
    enabled = getattr(torch.backends.cuda, "cudnn_sdp_enabled", None)
    return enabled is not None and bool(enabled())


def fp16_accumulation() -> bool | None:
    """Whether float16 products add up in float16; None before 2.7, which could not be told to."""
    if RELEASE < (2, 7):  # not by hasattr, for which 2.1 raises an AssertionError
        return None
    return bool(torch.backends.cuda.matmul.allow_fp16_accumulation)


def end_recording_to_pool(device_index: int, pool: Any) -> None:
    """Have the allocator put nothing more into the pool of a CUDA graph that failed.

    Raises:
        RuntimeError: It puts nothing there.
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
    """A dim for `torch.export` that is symbolic between these bounds.

    torch 2.6 takes bounds only for dims with names, of which equal ones are one symbol.
    """
    automatic: Any = torch.export.Dim.AUTO
    if callable(automatic):
        return automatic(min=least, max=most)
    return torch.export.Dim(name, min=least, max=most)


def ready_for_standalone_compile(graph_module: torch.fx.GraphModule) -> None:
    """Mend what `standalone_compile` stumbles over in an exported graph before 2.11.

    It looks for the mode of the fake tensors beside the outputs only, makes another one where it
    finds none, and then refuses the graph's own tensors for being of two modes. And a program that
    was stored notes values of products beside those of symbols, which it takes for symbols.
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
    """Without torch 2.6's warning for each layer of a block that is deliberately no submodule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unable to find the path of the module")
        yield


@functools.cache
def keep_device_guard() -> None:
    """Have a thread that stays be the first to use ``FakeTensorMode``, where that must not end.

    Built for CUDA and without a GPU, torch registers an object of the first thread that uses it for
    all others; when that thread has ended, the next use ends the process (seen with 2.11). Exports
    and loads run in threads that end.
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
