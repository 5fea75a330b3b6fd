"""Counts how often Neo loads weights into a model that it keeps.

With the setting ``refiner_fast_sd`` the refiner's weights replace the UNet's in place, in the
middle of sampling. The checkpoint's name and the weights' addresses stay the same, and the weights
are inference tensors, which count no versions.
"""

from __future__ import annotations

from typing import Any

from onediff_ext.engine.patches import Patches


class WeightLoads:
    """Watches ``backend.state_dict.load_state_dict``.

    Attributes:
        count: How often it was called while it was watched.
    """

    def __init__(self) -> None:
        self.count = 0

    def watch(self, patches: Patches) -> None:
        """Count calls of the host's function until `patches` are undone."""
        from backend import state_dict

        own = state_dict.load_state_dict

        def load_state_dict(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return own(*args, **kwargs)

        patches.set(state_dict, "load_state_dict", load_state_dict)
