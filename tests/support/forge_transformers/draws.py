"""The transformers of each host, and how a sampler calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    """Seeded noise."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux_call(height: int, width: int, batch: int, tokens: int, seed: int) -> dict[str, Any]:
    return {
        "x": noise(batch, 16, height, width, seed=seed),
        "timestep": torch.full((batch,), 0.7),
        "context": noise(batch, tokens, 24, seed=seed + 1),
        "y": noise(batch, 20, seed=seed + 2),
        "guidance": torch.full((batch,), 3.5),
    }


def chroma_call(height: int, width: int, batch: int, tokens: int, seed: int) -> dict[str, Any]:
    return {
        "x": noise(batch, 16, height, width, seed=seed),
        "timestep": torch.full((batch,), 0.7),
        "context": noise(batch, tokens, 24, seed=seed + 1),
    }


def sd3_call(height: int, width: int, batch: int, tokens: int, seed: int) -> dict[str, Any]:
    even = (height // 2 * 2, width // 2 * 2)  # which the host's sizes are there
    return {
        "x": noise(batch, 16, *even, seed=seed),
        "t": torch.full((batch,), 321.0),
        "context": noise(batch, tokens, 24, seed=seed + 1),
        "y": noise(batch, 20, seed=seed + 2),
    }


def flux2_call(*size: int) -> dict[str, Any]:
    return {name: v for name, v in flux_call(*size).items() if name != "guidance"}


def lumina_call(*size: int) -> dict[str, Any]:
    found = sd3_call(*size)
    return {"x": found["x"], "timesteps": found["t"] / 1000, "context": found["context"]}


def qwen_call(*size: int) -> dict[str, Any]:
    found = lumina_call(*size)
    return {**found, "x": found["x"].unsqueeze(2)}


def anima_call(*size: int) -> dict[str, Any]:
    found = qwen_call(*size)
    return {**found, "context": found["context"].unsqueeze(1)}


class Transformer(NamedTuple):
    """A transformer of a host.

    Args:
        host: ``"forge"`` or ``"neo"``.
        module, name: Where its class is.
        call: Makes the arguments of a call.
        kinds: Of its blocks.
        blocks: How many it has.
        layer: Name of a linear layer in one of them.
        attends_in: The Python module whose global these call for attention; empty for none.
        options: Of the class.
    """

    host: str
    module: str
    name: str
    call: Callable[..., dict[str, Any]]
    kinds: int
    blocks: int
    layer: str
    attends_in: str = "backend.nn.flux"
    options: Mapping[str, Any] = {}

    def make(self) -> nn.Module:
        """The model, while the host is there."""
        made: nn.Module = getattr(sys.modules[self.module], self.name)(**self.options)
        return made

    def draw(
        self,
        model: nn.Module,
        height: int = 8,
        width: int = 12,
        batch: int = 1,
        tokens: int = 40,
        seed: int = 1,
        dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> torch.Tensor:
        """One step as the host's samplers ask for it."""
        arguments = self.call(height, width, batch, tokens, seed)
        arguments = {name: value.to(dtype) for name, value in arguments.items()}
        with torch.inference_mode():
            result: torch.Tensor = model(**arguments, control=None, transformer_options={}, **more)
            return result.clone()


_FLUX = "IntegratedFluxTransformer2DModel"
TRANSFORMERS = {
    "forge flux": Transformer(
        "forge", "backend.nn.flux", _FLUX, flux_call, 2, 4, "single_blocks.0.linear1"
    ),
    "forge chroma": Transformer(
        "forge",
        "backend.nn.chroma",
        "IntegratedChromaTransformer2DModel",
        chroma_call,
        2,
        4,
        "single_blocks.0.linear1",
    ),
    "forge sd3": Transformer(
        "forge",
        "backend.nn.mmditx",
        "MMDiTX",
        sd3_call,
        3,
        4,
        "joint_blocks.1.x_block.mlp.0",
        "",
    ),
    "neo flux": Transformer(
        "neo", "backend.nn.flux", _FLUX, flux_call, 2, 4, "single_blocks.0.linear1"
    ),
    "neo flux2": Transformer(
        "neo",
        "backend.nn.flux",
        _FLUX,
        flux2_call,
        2,
        4,
        "single_blocks.0.linear1",
        options={"global_modulation": True},
    ),
    "neo lumina2": Transformer(
        "neo",
        "backend.nn.lumina",
        "NextDiT",
        lumina_call,
        2,
        4,
        "layers.0.feed_forward.w1",
        "backend.nn.lumina",
    ),
    "neo qwen-image": Transformer(
        "neo",
        "backend.nn.qwen",
        "QwenImageTransformer2DModel",
        qwen_call,
        1,
        3,
        "transformer_blocks.0.attn.to_q",
        "backend.nn.qwen",
    ),
    "neo anima": Transformer(
        "neo",
        "backend.nn.anima",
        "Anima",
        anima_call,
        1,
        3,
        "blocks.0.self_attn.q_proj",
        "backend.nn.anima",
    ),
}
