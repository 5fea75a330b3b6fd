"""``--device`` as a torch object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onediff_ext.core.errors import OptionError

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> torch.device:
    """Return the device of ``--device``; a GPU for "auto" if torch sees one.

    Raises:
        OptionError: The device does not exist, or is neither a CPU nor an NVIDIA GPU.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"Device {name!r} cannot be used.", "Use cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"torch sees no GPU {name!r}.", "Use --device cpu, or run `onediff-ext doctor`."
        )
    return device
