"""Small UNets built as the WebUIs build theirs: input_blocks, middle_block, output_blocks.

Written from the architecture (Rombach et al. 2022, arXiv:2112.10752) and from how each host
calls blocks; the hosts' own classes are not available to tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support.models import randomize


class TimestepBlock(nn.Module):
    """A layer that takes the time embedding."""


class Res(TimestepBlock):
    """x [B, C, h, w], emb [B, E] -> [B, D, h, w]."""

    def __init__(self, inside: int, outside: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(embedding, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        h = self.first(functional.silu(x)) + self.time(emb)[:, :, None, None]
        return self.skip(x) + 0.3 * self.second(functional.silu(h))


class CrossAttention(nn.Module):
    """x [B, C, h, w], context [B, n, D] -> x."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(context, width), nn.Linear(context, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            self.q(tokens)[:, None], self.k(context)[:, None], self.v(context)[:, None]
        )[:, 0]
        return x + self.out(mixed).transpose(1, 2).view_as(x)


class Down(nn.Module):
    """Halves height and width, rounding up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class Up(nn.Module):
    """Doubles height and width, or brings them to a given shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor, output_shape: Any = None) -> torch.Tensor:
        size = (x.shape[2] * 2, x.shape[3] * 2) if output_shape is None else output_shape[2:]
        return self.conv(functional.interpolate(x, size=tuple(size)))


def run_layers(
    layers: Any, x: torch.Tensor, emb: torch.Tensor, context: Any, output_shape: Any = None
) -> torch.Tensor:
    """Each layer with what it takes."""
    for layer in layers:
        if isinstance(layer, TimestepBlock):
            x = layer(x, emb)
        elif isinstance(layer, CrossAttention):
            x = layer(x, context)
        elif isinstance(layer, Up):
            x = layer(x, output_shape)
        else:
            x = layer(x)
    return x


class Block(nn.Sequential):
    """One entry of the lists."""

    def forward(self, x: Any, emb: Any, context: Any = None, output_shape: Any = None) -> Any:
        return run_layers(self, x, emb, context, output_shape)


class CompvisUNet(nn.Module):
    """A1111's UNet: where sizes differ at a skip connection, the upsampled image is resized.

    x [B, 4, h, w], timesteps [B], context [B, n, context] -> [B, 4, h, w].
    """

    def __init__(
        self, widths: tuple[int, ...] = (16, 32, 32), context: int = 24, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = 32
        self.time = nn.Linear(16, self.embedding)
        wide = widths[0]
        self.input_blocks = nn.ModuleList([Block(nn.Conv2d(4, wide, 3, padding=1))])
        skips = [wide]
        for level, width in enumerate(widths):
            for _ in range(layers):
                self.input_blocks.append(self._layers(wide, width, context))
                wide = width
                skips.append(wide)
            if level < len(widths) - 1:
                self.input_blocks.append(Block(Down(wide)))
                skips.append(wide)
        self.middle_block = Block(
            Res(wide, wide, self.embedding),
            CrossAttention(wide, context),
            Res(wide, wide, self.embedding),
        )
        self.output_blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(layers + 1):
                block = self._layers(wide + skips.pop(), width, context)
                wide = width
                if level and i == layers:
                    block.append(Up(wide))
                self.output_blocks.append(block)
        self.out = nn.Sequential(nn.SiLU(), nn.Conv2d(wide, 4, 3, padding=1))
        randomize(self, 5)
        self.eval().requires_grad_(False)

    def _layers(self, inside: int, outside: int, context: int) -> Block:
        return Block(Res(inside, outside, self.embedding), CrossAttention(outside, context))

    def embed(self, timesteps: torch.Tensor) -> torch.Tensor:
        """[B] -> [B, E]."""
        angles = timesteps[:, None].float() / 10 ** torch.linspace(0, 3, 8)
        return self.time(torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, x: Any, timesteps: Any = None, context: Any = None, y: Any = None) -> Any:
        hs, h, emb = [], x, self.embed(timesteps)
        for block in self.input_blocks:
            h = block(h, emb, context)
            hs.append(h)
        h = self.middle_block(h, emb, context)
        for block in self.output_blocks:
            skip = hs.pop()
            if h.shape[2:] != skip.shape[2:]:
                h = functional.interpolate(h, skip.shape[2:])
            h = block(torch.cat([h, skip], dim=1), emb, context)
        return self.out(h)


class ForgeUNet(CompvisUNet):
    """Forge's UNet: control and options come as arguments, blocks are told the skip's shape,
    residuals are taken from the ends of lists and added in place."""

    calls_blocks = True

    def forward(
        self,
        x: Any,
        timesteps: Any = None,
        context: Any = None,
        y: Any = None,
        control: Any = None,
        transformer_options: Any = None,
    ) -> Any:
        options = {} if transformer_options is None else transformer_options
        patches = options.get("patches", {}).get("output_block_patch", ())
        hs, h, emb = [], x, self.embed(timesteps)
        for number, block in enumerate(self.input_blocks):
            options["block"] = ("input", number)
            h = self._controlled(self._run(block, h, emb, context), control, "input")
            hs.append(h)
        h = self._controlled(self._run(self.middle_block, h, emb, context), control, "middle")
        for number, block in enumerate(self.output_blocks):
            options["block"] = ("output", number)
            skip = self._controlled(hs.pop(), control, "output")
            for patch in patches:
                h, skip = patch(h, skip, options)
            h = torch.cat([h, skip], dim=1)
            h = self._run(block, h, emb, context, hs[-1].shape if hs else None)
        return self.out(h)

    def _run(self, block: Any, h: Any, emb: Any, context: Any, shape: Any = None) -> Any:
        if self.calls_blocks:
            return block(h, emb, context, shape)
        return run_layers(block, h, emb, context, shape)

    @staticmethod
    def _controlled(h: torch.Tensor, control: Any, name: str) -> torch.Tensor:
        if control is not None and control.get(name):
            residual = control[name].pop()
            if residual is not None:
                h += residual
        return h


class ReForgeUNet(ForgeUNet):
    """reForge's VAE: blocks are never called, only their layers."""

    calls_blocks = False


LDM_UNETS = {"a1111": CompvisUNet, "forge": ForgeUNet, "reforge": ReForgeUNet}
