"""Models that diffusers moves to the GPU and back (``enable_model_cpu_offload``)."""

from __future__ import annotations

from typing import Any

from torch import nn


def offloaded_models(pipe: Any) -> list[nn.Module]:
    """Return a pipeline's models that are moved as a whole, each for its phase of a picture.

    Args:
        pipe: The pipeline; one without ``components`` moves nothing.
    """
    components = getattr(pipe, "components", {}).values()
    return [m for m in components if isinstance(m, nn.Module) and _is_moved_as_a_whole(m)]


def _is_moved_as_a_whole(model: nn.Module) -> bool:
    hook = getattr(model, "_hf_hook", None)  # accelerate's
    return any(type(each).__name__ == "CpuOffload" for each in getattr(hook, "hooks", (hook,)))
