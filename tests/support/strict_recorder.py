"""A recorder for CPUs that fails where a GPU would: on a copy from the CPU while it records."""

from __future__ import annotations

from typing import Any

from onediff_ext.engine.cuda_graphs.recorder import Recording
from tests.support.forge_blocks_stand_in import Device
from tests.support.frozen_recorder import FrozenRecorder


class StrictRecorder(FrozenRecorder):
    """Lets nothing be copied from the CPU while it records."""

    def record(self, *args: Any, **kwargs: Any) -> Recording:
        Device.is_recording = True
        try:
            return super().record(*args, **kwargs)
        finally:
            Device.is_recording = False
