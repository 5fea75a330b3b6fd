"""Asynchronous copies of the noise that samplers add at each step to the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onediff_ext.engine.patches import Patches


@contextmanager
def noise_sent_ahead(scheduler: Any) -> Iterator[None]:
    """Copy a diffusers scheduler's noise to the GPU without waiting, within this ``with`` block.

    Noise is drawn on the CPU, so a seed gives the same picture on every device. diffusers copies
    it synchronously: each step waits until the GPU has finished all earlier work.
    """
    module = sys.modules[type(scheduler).__module__]
    with Patches() as patches:
        if hasattr(module, "randn_tensor"):
            patches.set(module, "randn_tensor", _sending_ahead(module.randn_tensor))
        yield


def _sending_ahead(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap diffusers' `randn_tensor` for noise that goes from the CPU to a GPU."""

    def randn_tensor(
        shape: Any, generator: Any = None, device: Any = None, *others: Any, **named: Any
    ) -> torch.Tensor:
        target = torch.device(device or "cpu")
        first = generator[0] if isinstance(generator, list) else generator
        if target.type != "cuda" or first is None or first.device.type != "cpu":
            return own(shape, generator, device, *others, **named)
        noise = own(shape, generator, torch.device("cpu"), *others, **named)
        # torch keeps the pinned memory until the copy is done.
        return noise.pin_memory().to(target, non_blocking=True)

    return randn_tensor
