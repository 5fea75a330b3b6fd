"""DeepCache for UNets with input_blocks, middle_block and output_blocks: ldm, sgm, Forge, reForge.

Block i of the encoder makes skip connection i; the decoder's blocks take them in reverse. At depth
n the first n + 1 blocks of the encoder and the last n + 1 of the decoder run.

The lists keep their length, because extensions count blocks, and ControlNet's residuals follow
their order. Stand-ins for skipped blocks return zeros of the right shape. The last stand-in returns
the feature; the other outputs have no effect.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.features import Feature
from onediff_ext.engine.deepcache.known_layers import KnownLayers
from onediff_ext.engine.deepcache.unet_adapter import (
    Replay,
    Uncached,
    UNetAdapter,
    UNetCall,
    keeping,
    replaced,
)
from onediff_ext.engine.torch_versions import autocast_dtype

_LATENT_CHANNELS = 4
_ORDER = ("x", "timesteps", "context", "y")
_NAMES = ("input_blocks", "middle_block", "output_blocks")
# Forge's hooks around blocks, which may change the shape of what goes through.
_MODIFIERS = ("block_modifiers", "block_inner_modifiers")


class _Zeros(nn.Module):
    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self._shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Real memory, since hosts add to it in place. The batch may be half of the noted one.
        return x.new_zeros((x.shape[0], *self._shape[1:]))


class _Feature(nn.Module):
    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.forward = Replay(feature)


class _StandIn(nn.Sequential):
    """A block of one layer. Some hosts call a block, others call its layers."""

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        output: torch.Tensor = self[0](input)
        return output


class LdmUNet(UNetAdapter):
    """The adapter for one such UNet.

    Args:
        unet: A UNet of this form.

    Raises:
        OptionError: It has another form.
    """

    def __init__(self, unet: Any) -> None:
        if not is_ldm_unet(unet):
            raise OptionError(
                f"DeepCache does not know the blocks of this {type(unet).__name__}.",
                "It works with the UNets of SD 1.x, SD 2.x and SDXL.",
            )
        self._unet = unet
        self._blocks = len(unet.output_blocks)
        self._known = KnownLayers()

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> UNetCall | Uncached:
        given = {**dict(zip(_ORDER, args, strict=False)), **kwargs}
        # x [2B, C, H/8, W/8], context [2B, 77n, D]
        x, context = given.get("x"), given.get("context")
        if not isinstance(x, torch.Tensor) or len(args) > len(_ORDER):
            return Uncached("the UNet was called in a way that is not known")
        options = given.get("transformer_options") or {}
        for name in _MODIFIERS:
            if options.get(name):
                return Uncached("an extension changes what goes from block to block")
        # Forge marks its calls as those for the prompt and those for the negative prompt.
        parts = tuple(options.get("cond_or_uncond") or ())
        dtypes = (x.dtype, autocast_dtype(x.device.type))
        kind = (x.shape, dtypes, x.device, getattr(context, "shape", None), parts)
        unet = self._unet
        self._known.look([*unet.input_blocks, unet.middle_block, *unet.output_blocks])
        state = (
            self._known.version,
            _lengths(given.get("control")),
            _lengths(options.get("patches")),
            _lengths(options.get("patches_replace")),
        )
        # Further channels are a mask and an image, which differ between CFG's calls.
        return UNetCall(kind, state, x.shape[0], x[:, :_LATENT_CHANNELS])

    def max_depth(self) -> int:
        return self._blocks - 2

    @contextmanager
    def full(self, depth: int, feature: Feature) -> Iterator[None]:
        boundary = _last(self._unet.output_blocks[self._blocks - depth - 2])
        shapes = self._parts_of(feature).setdefault("shapes", {})
        hooks = []
        if not shapes:
            for place, block in self._skipped(depth):
                hooks.append(_last(block).register_forward_hook(_NoteShape(shapes, place)))
        try:
            with keeping(boundary, feature):
                yield
        except BaseException:
            if hooks:
                shapes.clear()  # those of some blocks only
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def shallow(self, depth: int, feature: Feature) -> AbstractContextManager[None]:
        parts = self._parts_of(feature)
        stand_ins = parts.get("stand-ins")
        if stand_ins is None:
            stand_ins = parts["stand-ins"] = self._make_stand_ins(depth, parts["shapes"], feature)
        return replaced(stand_ins)

    def shallow_arguments(
        self, depth: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        control = kwargs.get("control")
        if not control:
            return tuple(args), dict(kwargs)
        # Each block takes the last element that is left in its list.
        kept = {name: list(values) for name, values in control.items()}
        for name, values in kept.items():
            for i in range(len(values)):
                block = len(values) - 1 - i
                if (
                    name == "middle"
                    or (name == "input" and block > depth)
                    or (name == "output" and block < self._blocks - depth - 1)
                ):
                    values[i] = None
        return tuple(args), {**kwargs, "control": kept}

    def _skipped(self, depth: int) -> Iterator[tuple[tuple[str, int], nn.Module]]:
        """The blocks that a shallow forward leaves out, with their places."""
        unet = self._unet
        for index in range(depth + 1, len(unet.input_blocks)):
            yield ("input_blocks", index), unet.input_blocks[index]
        yield ("middle_block", 0), unet.middle_block
        for index in range(self._blocks - depth - 1):
            yield ("output_blocks", index), unet.output_blocks[index]

    def _parts_of(self, feature: Feature) -> dict[str, Any]:
        """What this adapter has made for a feature and the blocks that the UNet has now."""
        version, parts = feature.parts.get("ldm", (None, {}))
        if version != self._known.version:
            parts = {}
            feature.parts["ldm"] = self._known.version, parts
        made: dict[str, Any] = parts
        return made

    def _make_stand_ins(
        self, depth: int, shapes: Mapping[Hashable, torch.Size], feature: Feature
    ) -> tuple[tuple[nn.Module, str, nn.Module | None], ...]:
        unet = self._unet
        stand_ins = {place: _StandIn(_Zeros(shapes[place])) for place, _ in self._skipped(depth)}
        stand_ins["output_blocks", self._blocks - depth - 2] = _StandIn(_Feature(feature))

        def listed(name: str) -> nn.ModuleList:
            blocks = enumerate(getattr(unet, name))
            return nn.ModuleList(stand_ins.get((name, i), block) for i, block in blocks)

        return (
            (unet, "input_blocks", listed("input_blocks")),
            (unet, "middle_block", stand_ins["middle_block", 0]),
            (unet, "output_blocks", listed("output_blocks")),
        )


class _NoteShape:
    """A hook that notes the shape of what a block returns."""

    def __init__(self, shapes: dict[Hashable, torch.Size], place: Hashable) -> None:
        self._shapes, self._place = shapes, place

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self._shapes[self._place] = output.shape


def is_ldm_unet(unet: object) -> bool:
    """Whether a UNet has this form."""
    return all(isinstance(getattr(unet, name, None), nn.Module) for name in _NAMES) and (
        len(unet.input_blocks) == len(unet.output_blocks) > 2  # type: ignore[attr-defined]
    )


def _last(block: Any) -> nn.Module:
    """The last layer of a block, which every host calls as a module."""
    layer: nn.Module = block[-1]
    return layer


def _lengths(lists: Mapping[str, Any] | None) -> tuple[tuple[str, int], ...]:
    """How many elements of each list are not None."""
    return tuple(
        (name, sum(value is not None for value in values))
        for name, values in sorted((lists or {}).items())
    )
