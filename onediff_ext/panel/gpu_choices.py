"""The choice "GPUs": how many GPUs of this machine draw a folder."""

from __future__ import annotations

from onediff_ext.core.errors import OptionError

ONE, ALL = "1", "all of this machine"


def gpu_count() -> int:
    """Return how many GPUs torch sees."""
    import torch

    return torch.cuda.device_count()


def gpu_choices() -> list[str]:
    """Return the choices; only one on a machine without a second GPU."""
    count = gpu_count()
    return [ONE] if count < 2 else [ONE, *(str(n) for n in range(2, count)), ALL]


def chosen_gpu_count(choice: str) -> int:
    """Return the number of GPUs that a choice stands for.

    On a machine without a GPU it is a number of processes.

    Args:
        choice: `ALL`, "all", or a number.

    Raises:
        OptionError: It is none of them, or the machine has fewer.
    """
    count = gpu_count()
    if choice in (ALL, "all"):
        return max(1, count)
    if not choice.isdecimal() or int(choice) < 1:
        raise OptionError(f'"{choice}" is no number of GPUs.', 'Use 1, 2, … or "all".')
    if count and int(choice) > count:
        raise OptionError(f"This machine has {count} GPUs, not {choice}.", 'Use "all".')
    return int(choice)
