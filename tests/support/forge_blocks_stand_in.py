"""Small blocks with the names, signatures and habits of Forge's, Neo's and reForge's own.

The real packages belong to the WebUIs and are not on CI's machines. What matters of them is
here: layers that cast their weights and may have a LoRA of their own, a transformer block that
writes into its input and takes patches, attention by a function of its module, and models that
are left in training mode.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.support.forge_lora_stand_in import lora_modules
from tests.support.forge_transformers import import_transformers
from tests.support.ldm_stand_in import live_in, written_in

Namespace = dict[str, Any]


def cast(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Bring a weight to where a layer computes."""
    return Device.cast(weight, x)


def apply_functions(functions: list[Any], weight: Any) -> Any:
    """Apply a layer's functions to a copy of a weight, which they may write to."""
    if functions:
        weight = weight.clone()
    for function in functions:
        weight = function(weight)
    return weight


def forge_layers() -> type:
    """Layers as in ``backend.operations``: Linear is no `nn.Linear`, casts are a flag."""

    class ForgeOperations:
        class Linear(nn.Module):
            def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
                super().__init__()
                plain = nn.Linear(inputs, outputs, bias)
                self.weight, self.bias = plain.weight, plain.bias
                self.parameters_manual_cast = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, bias = self.weight, self.bias
                if self.parameters_manual_cast:
                    weight = cast(weight, x)
                    bias = None if bias is None else cast(bias, x)
                for add in getattr(self, "forge_online_loras", {}).values():
                    weight = weight + add
                return F.linear(x, weight, bias)

        class Conv2d(nn.Conv2d):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.parameters_manual_cast = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.parameters_manual_cast:
                    return self._conv_forward(x, cast(self.weight, x), cast(self.bias, x))
                return self._conv_forward(x, self.weight, self.bias)

        class GroupNorm(nn.GroupNorm):
            parameters_manual_cast = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, bias = cast(self.weight, x), cast(self.bias, x)
                return F.group_norm(x, self.num_groups, weight, bias)

        class LayerNorm(nn.LayerNorm):
            parameters_manual_cast = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, bias = cast(self.weight, x), cast(self.bias, x)
                return F.layer_norm(x, self.normalized_shape, weight, bias)

    return ForgeOperations


def reforge_layers() -> type:
    """Layers as in ``ldm_patched.modules.ops``: functions on weights, casts by a class flag."""

    class disable_weight_init:  # noqa: N801
        pass

    def layer(base: type, compute: Callable[..., torch.Tensor]) -> type:
        class Layer(base):  # type: ignore[misc, valid-type]
            ldm_patched_cast_weights = False
            weight_function: list[Any] = []  # noqa: RUF012
            bias_function: list[Any] = []  # noqa: RUF012

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, bias = self.weight, self.bias
                if self.ldm_patched_cast_weights:
                    weight = cast(weight, x)
                    bias = None if bias is None else cast(bias, x)
                weight = apply_functions(self.weight_function, weight)
                bias = apply_functions(self.bias_function, bias)
                return compute(self, x, weight, bias)

        Layer.__name__ = base.__name__
        Layer.__qualname__ = f"disable_weight_init.{base.__name__}"
        return Layer

    for base, compute in _COMPUTATIONS.items():
        setattr(disable_weight_init, base.__name__, layer(base, compute))
    return disable_weight_init


def neo_layers() -> type:
    """Layers as in Neo's ``backend.operations``: torch's own classes, with functions on weights."""

    class ForgeOperations:
        pass

    def layer(base: type, compute: Callable[..., torch.Tensor]) -> type:
        class Layer(base):  # type: ignore[misc, valid-type]
            parameters_manual_cast = False
            weight_function: list[Any] = []  # noqa: RUF012
            bias_function: list[Any] = []  # noqa: RUF012

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, bias = self.weight, getattr(self, "bias", None)
                if self.parameters_manual_cast:
                    weight = cast(weight, x)
                    bias = None if bias is None else cast(bias, x)
                weight = apply_functions(self.weight_function, weight)
                bias = apply_functions(self.bias_function, bias)
                return compute(self, x, weight, bias)

        Layer.__name__ = base.__name__
        return Layer

    norms = {nn.RMSNorm: lambda m, x, w, _: F.rms_norm(x, m.normalized_shape, w, m.eps)}
    for base, compute in {**_COMPUTATIONS, **norms}.items():
        setattr(ForgeOperations, base.__name__, layer(base, compute))
    return ForgeOperations


_COMPUTATIONS: dict[type, Callable[..., torch.Tensor]] = {
    nn.Linear: lambda m, x, w, b: F.linear(x, w, b),
    nn.Conv2d: lambda m, x, w, b: m._conv_forward(x, w, b),
    nn.GroupNorm: lambda m, x, w, b: F.group_norm(x, m.num_groups, w, b, m.eps),
    nn.LayerNorm: lambda m, x, w, b: F.layer_norm(x, m.normalized_shape, w, b, m.eps),
}


def make_blocks(ops: Any, attention: Any, options_to_resnets: bool) -> Namespace:
    """The blocks of one host over its layers.

    Args:
        ops: Has Linear, Conv2d, GroupNorm, LayerNorm.
        attention: A namespace whose ``function`` and ``spatial`` compute attention, and whose
            ``embed`` makes vectors of timesteps.
        options_to_resnets: Whether residual blocks are handed the options, as in Forge.
    """

    class ResBlock(nn.Module):
        """x [B, C, H, W], emb [B, E] → [B, C', H, W]."""

        def __init__(self, channels: int, emb: int, out_channels: int, dropout: float = 0) -> None:
            super().__init__()
            self.channels, self.out_channels = channels, out_channels
            self.updown = self.skip_t_emb = self.exchange_temb_dims = False
            self.in_layers = nn.Sequential(
                ops.GroupNorm(8, channels),
                nn.SiLU(),
                ops.Conv2d(channels, out_channels, 3, padding=1),
            )
            self.emb_layers = nn.Sequential(nn.SiLU(), ops.Linear(emb, out_channels))
            self.out_layers = nn.Sequential(
                ops.GroupNorm(8, out_channels),
                nn.SiLU(),
                nn.Dropout(p=dropout),
                ops.Conv2d(out_channels, out_channels, 3, padding=1),
            )
            same = channels == out_channels
            self.skip_connection = nn.Identity() if same else ops.Conv2d(channels, out_channels, 1)

        if options_to_resnets:

            def forward(self, x: Any, emb: Any, transformer_options: Any = None) -> Any:
                return self._forward(x, emb, transformer_options or {})

        else:

            def forward(self, x: Any, emb: Any) -> Any:
                return self._forward(x, emb, {})

        def _forward(self, x: Any, emb: Any, transformer_options: Any = None) -> Any:
            wrap = (transformer_options or {}).get("group_norm_wrapper")
            norm = self.in_layers[0]
            h = wrap(norm, x) if wrap else norm(x)
            h = self.in_layers[1:](h) + self.emb_layers(emb)[..., None, None]
            return self.skip_connection(x) + self.out_layers(h)

    class CrossAttention(nn.Module):
        def __init__(self, dim: int, context: int | None, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.to_q = ops.Linear(dim, dim, bias=False)
            self.to_k = ops.Linear(context or dim, dim, bias=False)
            self.to_v = ops.Linear(context or dim, dim, bias=False)
            self.to_out = nn.Sequential(ops.Linear(dim, dim), nn.Dropout(0.0))

        def forward(
            self, x: Any, context: Any = None, value: Any = None, transformer_options: Any = None
        ) -> Any:
            context = x if context is None else context
            q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
            return self.to_out(attention.function(q, k, v, self.heads))

    class FeedForward(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.proj, self.out = ops.Linear(dim, dim * 8), ops.Linear(dim * 4, dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, gate = self.proj(x).chunk(2, dim=-1)
            result: torch.Tensor = self.out(x * F.gelu(gate))
            return result

    class BasicTransformerBlock(nn.Module):
        """x [B, N, D], context [B, M, C] → [B, N, D]; x itself is written into."""

        def __init__(self, dim: int, n_heads: int, context: int) -> None:
            super().__init__()
            self.n_heads, self.d_head = n_heads, dim // n_heads
            self.attn1 = CrossAttention(dim, None, n_heads)
            self.attn2 = CrossAttention(dim, context, n_heads)
            self.ff = FeedForward(dim)
            self.norm1, self.norm2, self.norm3 = (ops.LayerNorm(dim) for _ in range(3))

        def forward(self, x: Any, context: Any = None, transformer_options: Any = None) -> Any:
            options = transformer_options or {}
            x += self.attn1(self.norm1(x), transformer_options=options)
            n = self.norm2(x)
            for patch in options.get("patches", {}).get("attn2_patch", ()):
                n = patch(n)
            replaced = options.get("patches_replace", {}).get("attn2", {})
            if options.get("block") in replaced:
                x += replaced[options["block"]](n)
            else:
                x += self.attn2(n, context=context, transformer_options=options)
            return x + self.ff(self.norm3(x))

    class UNet(nn.Module):
        """x [B, 4, H, W], timesteps [B], context [B, M, 24] → [B, 4, H, W]."""

        num_classes, in_channels = None, 4

        def __init__(self) -> None:
            super().__init__()
            self.time_embed = ops.Linear(8, 12)
            self.entry = ops.Conv2d(4, 16, 3, padding=1)
            self.first, self.second = ResBlock(16, 12, 16), ResBlock(16, 12, 32)
            self.third = ResBlock(16, 12, 16)
            self.transformer = BasicTransformerBlock(32, 4, 24)
            # Behind the blocks it would hide what one is multiplied with.
            self.norm = ops.GroupNorm(8, 16)
            self.out = ops.Conv2d(32, 4, 3, padding=1)

        def forward(
            self,
            x: Any,
            timesteps: Any,
            context: Any = None,
            control: Any = None,
            transformer_options: Any = None,
            **_: Any,
        ) -> Any:
            options = {} if transformer_options is None else transformer_options
            given = (options,) if options_to_resnets else ()
            options["block"] = ("middle", 0)
            emb = self.time_embed(attention.embed(timesteps, 8))
            h = self.third(self.first(self.norm(self.entry(x)), emb, *given), emb, *given)
            h = self.second(h, emb, *given)
            if control and control["middle"]:
                h = h + control["middle"].pop()
            for patch in options.get("patches", {}).get("output_block_patch", ()):
                h = patch(h)
            tokens = h.flatten(2).transpose(1, 2).contiguous()
            tokens = self.transformer(tokens, context=context, transformer_options=options)
            return self.out(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))

    class ResnetBlock(nn.Module):
        """The VAE's: x [B, C, H, W] → [B, C', H, W]; `temb` is None."""

        def __init__(self, in_channels: int, out_channels: int) -> None:
            super().__init__()
            self.in_channels, self.out_channels = in_channels, out_channels
            self.swish = nn.SiLU(inplace=True)
            self.norm1 = ops.GroupNorm(8, in_channels)
            self.conv1 = ops.Conv2d(in_channels, out_channels, 3, padding=1)
            if in_channels != out_channels:
                self.nin_shortcut = ops.Conv2d(in_channels, out_channels, 1)

        def forward(self, x: torch.Tensor, temb: torch.Tensor | None) -> torch.Tensor:
            h = self.conv1(self.swish(self.norm1(x)))
            return (self.nin_shortcut(x) if self.in_channels != self.out_channels else x) + h

    class AttnBlock(nn.Module):
        """The VAE's: x [B, C, H, W] → the same."""

        def __init__(self, in_channels: int) -> None:
            super().__init__()
            self.in_channels = in_channels
            self.norm = ops.GroupNorm(8, in_channels)
            self.q, self.k, self.v, self.proj_out = (
                ops.Conv2d(in_channels, in_channels, 1) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            mixed = attention.spatial(self.q(h), self.k(h), self.v(h))
            result: torch.Tensor = x + self.proj_out(mixed)
            return result

    class Half(nn.Module):
        """Encoder or decoder: [B, C, stride H, stride W] → [B, C', H, W]."""

        def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
            super().__init__()
            self.conv_in = ops.Conv2d(inputs, 16, 3, stride=stride, padding=1)
            self.attention, self.block = AttnBlock(16), ResnetBlock(16, 8)
            self.norm_out = nn.GroupNorm(4, 8)
            self.conv_out = ops.Conv2d(8, outputs, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm_out(self.block(self.attention(self.conv_in(x)), None))
            result: torch.Tensor = self.conv_out(h)
            return result

    found = {name: value for name, value in locals().items() if isinstance(value, type)}
    del found["ops"]
    return found


class Device:
    """The stand-in GPU.

    Attributes:
        is_recording: Whether it records a CUDA graph, during which it may not copy from the CPU.
        cast: How the hosts bring a weight to where a layer computes: without a wait for the GPU.
    """

    is_recording = False

    @staticmethod
    def cast(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return weight.to(device=x.device, dtype=x.dtype, non_blocking=True)


def embed_from_the_cpu(
    timesteps: torch.Tensor, dim: int, max_period: float = 10000, repeat_only: bool = False
) -> torch.Tensor:
    """Forge's embedding; copying the frequencies makes the GPU wait. [B] → [B, dim]."""
    if repeat_only:
        return timesteps[:, None].expand(-1, dim)
    if Device.is_recording:
        raise RuntimeError("operation not permitted when stream is capturing")
    half = dim // 2
    steps = torch.arange(start=0, end=half, dtype=torch.float32)
    freqs = torch.exp(-math.log(max_period) * steps / half).to(device=timesteps.device)
    args = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def embed_on_the_gpu(timesteps: torch.Tensor, dim: int) -> torch.Tensor:
    """reForge's embedding. [B] → [B, dim]."""
    steps = torch.arange(dim // 2, dtype=torch.float32, device=timesteps.device)
    args = timesteps[:, None] * torch.exp(-math.log(10000) * steps / (dim // 2))[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def attention_in_slices(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: object = None,
    skip_reshape: bool = False,
    **_: Any,
) -> Any:
    """Slices by size, which freezes the number of tokens when it is traced."""
    if not skip_reshape:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    mixed = torch.empty_like(q)
    for start in range(0, q.shape[2], 16):
        part = slice(start, start + 16)
        scores = q[:, :, part] @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mixed[:, :, part] = scores.softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2)


def spatial_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head over all cells. [B, C, H, W] → [B, C, H, W]."""
    scores = q.flatten(2).transpose(1, 2) @ k.flatten(2) * q.shape[1] ** -0.5
    return (v.flatten(2) @ scores.softmax(-1).transpose(1, 2)).unflatten(2, q.shape[2:])


@contextmanager
def installed(name: str) -> Iterator[SimpleNamespace]:
    """One host's packages in `sys.modules`, as far as blocks and attention need them.

    Yields:
        Its classes, and ``attention``, whose ``function`` is the host's present choice.
    """
    attention = SimpleNamespace()
    if name in ("forge", "neo"):
        ops, homes = forge_layers() if name == "forge" else neo_layers(), _FORGE_HOMES
        ops.__module__ = "backend.operations"
        ops.__qualname__ = "ForgeOperations"
        layers = [cls for cls in vars(ops).values() if isinstance(cls, type)]
        for cls in layers:
            live_in(cls, "backend.operations")
            cls.__qualname__ = f"ForgeOperations.{cls.__name__}"
    else:
        ops, homes = reforge_layers(), _REFORGE_HOMES
        for cls in [cls for cls in vars(ops).values() if isinstance(cls, type)]:
            live_in(cls, "ldm_patched.modules.ops")
    classes = make_blocks(ops, attention, options_to_resnets=name != "reforge")
    contents: dict[str, Namespace] = {home: {} for home in homes.values()}
    contents[homes["layers"]] = {ops.__name__: ops}
    contents.update(lora_modules(name))
    for cls_name, cls in classes.items():
        home = homes.get(cls_name, homes["ResBlock"])
        live_in(cls, home)
        cls.__qualname__ = cls_name
        contents[home][cls_name] = cls
    known = homes["attention"]
    attention_module = contents.setdefault(known, {})
    names = _ATTENTION_NAMES[name]
    for own, function in (
        (names.own, attention_in_slices),
        (names.own_in_vae, spatial_attention),
    ):
        attention_module[own] = written_in(function, known)
        attention_module[own].__name__ = own
    attention_module["get_attn_precision"] = names.precision
    attention_module[names.chosen] = attention_module[names.own]
    # Neo and reForge have these in their module of attention, too.
    attention_module[names.chosen_in_vae] = attention_module[names.own_in_vae]
    embed = embed_on_the_gpu if name == "reforge" else embed_from_the_cpu
    chosen: dict[str, tuple[str, str, Any]] = {
        "function": (
            homes["BasicTransformerBlock"],
            names.chosen,
            attention_module[names.own],
        ),
        "spatial": (
            homes["ResnetBlock"],
            names.chosen_in_vae,
            attention_module[names.own_in_vae],
        ),
        "embed": (homes["ResBlock"], "timestep_embedding", embed),
    }
    for home, variable, function in chosen.values():
        contents[home][variable] = function
    if name == "neo":
        arguments = SimpleNamespace(ops="ForgeOperations", ref_latents=None)
        contents["backend.args"] = {"dynamic_args": arguments}
    before = _install(contents)
    transformers = import_transformers(name)
    before |= {home: None for home in transformers if home not in before}  # none is real here
    vars(attention).update(
        {key: _Indirect(sys.modules[home], variable) for key, (home, variable, _) in chosen.items()}
    )
    try:
        modules = {k: sys.modules[k] for k in (*contents, *transformers)}
        yield SimpleNamespace(**classes, ops=ops, modules=modules)
    finally:
        _restore(before)


class _Indirect:
    """Calls whatever a module's variable holds now, as the host's own code does."""

    def __init__(self, module: ModuleType, variable: str) -> None:
        self._module, self._variable = module, variable

    def __call__(self, *args: Any) -> Any:
        return getattr(self._module, self._variable)(*args)


class _AttentionNames(NamedTuple):
    """Names of functions of attention: what the host has, and the variables that hold its choice.

    `precision` is the host's ``get_attn_precision``.
    """

    own: str
    own_in_vae: str
    chosen: str
    chosen_in_vae: str
    precision: Callable[..., torch.dtype | None]


_SINGLE_HEAD = "attention_function_single_head_spatial"
_ATTENTION_NAMES = {
    "forge": _AttentionNames(
        "attention_sub_quad",
        "normal_attention_single_head_spatial",
        "attention_function",
        _SINGLE_HEAD,
        lambda wanted: None,
    ),
    "reforge": _AttentionNames(
        "attention_sub_quad",
        "normal_attention_single_head_spatial",
        "optimized_attention",
        _SINGLE_HEAD,
        lambda wanted, dtype: None,
    ),
    "neo": _AttentionNames(
        "attention_basic",
        "normal_attention_vae",
        "attention_function",
        "attention_function_vae",
        lambda wanted, dtype: None,
    ),
}
_FORGE_HOMES = {
    "ResBlock": "backend.nn.unet",
    "BasicTransformerBlock": "backend.nn.unet",
    "ResnetBlock": "backend.nn.vae",
    "AttnBlock": "backend.nn.vae",
    "Half": "backend.nn.vae",
    "attention": "backend.attention",
    "layers": "backend.operations",
}
_REFORGE_HOMES = {
    "ResBlock": "ldm_patched.ldm.modules.diffusionmodules.openaimodel",
    "BasicTransformerBlock": "ldm_patched.ldm.modules.attention",
    "CrossAttention": "ldm_patched.ldm.modules.attention",
    "FeedForward": "ldm_patched.ldm.modules.attention",
    "ResnetBlock": "ldm_patched.ldm.modules.diffusionmodules.model",
    "AttnBlock": "ldm_patched.ldm.modules.diffusionmodules.model",
    "Half": "ldm_patched.ldm.modules.diffusionmodules.model",
    "attention": "ldm_patched.ldm.modules.attention",
    "layers": "ldm_patched.modules.ops",
}


def _install(contents: dict[str, Namespace]) -> dict[str, ModuleType | None]:
    names = {
        ".".join(name.split(".")[:depth])
        for name in contents
        for depth in range(1, name.count(".") + 2)
    }
    before = {name: sys.modules.get(name) for name in names}
    for name in sorted(names):
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = __file__
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    for name, values in contents.items():
        vars(sys.modules[name]).update(values)
    return before


def _restore(before: dict[str, ModuleType | None]) -> None:
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
