"""The noise that samplers add at each step, on its way to the GPU while that computes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onediff_ext.engine.patches import Patches


@contextmanager
def noise_sent_ahead(scheduler: Any) -> Iterator[None]:
    """Within this ``with`` block a diffusers scheduler does not wait for the GPU to take its noise.

    Noise is drawn on the CPU, so that a seed gives the same picture on every device. Copied as
    diffusers does it, each step waited until the GPU had done all that came before.
    """
    module = sys.modules[type(scheduler).__module__]
    with Patches() as patches:
        if hasattr(module, "randn_tensor"):
            patches.set(module, "randn_tensor", _sending_ahead(module.randn_tensor))
        yield


def _sending_ahead(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """diffusers' `randn_tensor`, but for noise that goes from the CPU to a GPU."""

    def randn_tensor(
        shape: Any, generator: Any = None, device: Any = None, *others: Any, **named: Any
    ) -> torch.Tensor:
        target = torch.device(device or "cpu")
        first = generator[0] if isinstance(generator, list) else generator
        if target.type != "cuda" or first is None or first.device.type != "cpu":
            return own(shape, generator, device, *others, **named)
        noise = own(shape, generator, torch.device("cpu"), *others, **named)
        # torch keeps pinned memory until it has been copied.
        return noise.pin_memory().to(target, non_blocking=True)

    return randn_tensor
