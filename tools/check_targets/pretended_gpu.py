"""Makes torch, Inductor and Triton generate code for a GPU that is not here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tools.check_targets.targets import BF16_SINCE, SHARED_BYTES

# Compute capability → (multiprocessors, threads of one) of a GPU of that generation: GeForce
# RTX 2080, A100, GeForce RTX 3090, 4090, H100, B200, GeForce RTX 5090.
_SIZES = {
    75: (46, 1024),
    80: (108, 2048),
    86: (82, 1536),
    89: (128, 1536),
    90: (132, 2048),
    100: (148, 2048),
    120: (170, 1536),
}


@contextlib.contextmanager
def pretended_gpu(capability: int) -> Iterator[None]:
    """Within the block, Inductor generates code for this generation. Nothing can run there.

    Enter it before anything imports Inductor, which keeps torch's own functions.

    Args:
        capability: Compute capability times ten.
    """
    from triton.runtime import driver

    # Before `is_available` says yes: torch prepares itself for fake tensors on a missing GPU.
    torch._C._ensureCUDADeviceGuardSet()
    number = divmod(capability, 10)
    properties = _properties(capability)
    answers = {
        "_exchange_device": lambda _: 0,
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": lambda _: 0,
        "current_device": lambda: 0,
        "current_stream": lambda *_: None,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: number,
        "get_device_properties": lambda *_: properties,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_: capability >= BF16_SINCE,
        "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: None,
    }
    before = driver._active
    driver.set_active(_Driver(capability))
    try:
        with contextlib.ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            stack.enter_context(_nothing_runs())
            yield
    finally:
        driver._active = before


@contextlib.contextmanager
def _nothing_runs() -> Iterator[None]:
    """Keep Inductor from what takes a real GPU."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers

    prepare = joint_graph.lazy_init

    def on_cpu(*_: object) -> None:
        """Trace its patterns, which takes real tensors."""
        prepare(torch.device("cpu"))

    with (
        mock.patch.object(joint_graph, "lazy_init", on_cpu),
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block"),
    ):
        yield


class _Driver:
    """Triton's view of the GPU."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


def _properties(capability: int) -> Any:
    major, minor = divmod(capability, 10)
    processors, threads = _SIZES[capability]
    return SimpleNamespace(
        name=f"a GPU of compute capability {major}.{minor}",
        major=major,
        minor=minor,
        multi_processor_count=processors,
        total_memory=24 * 2**30,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=SHARED_BYTES[capability],
        shared_memory_per_multiprocessor=SHARED_BYTES[capability] + 1024,
        L2_cache_size=6 * 2**20,
        gcnArchName="",
        uuid="pretended",
    )
