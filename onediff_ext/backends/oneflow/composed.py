"""Operators that OneFlow 0.9 lacks on some devices, composed of operators that it has.

`flow` is always the `oneflow` module; as an argument, so this file imports without it. Tensors are
OneFlow tensors, eager or of a graph under construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from onediff_ext.core.errors import BackendError


def layer_norm(
    flow: Any,
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001
) -> Any:
    """Normalise x [..., *normalized_shape] over its last dims.

    OneFlow's own `layer_norm` kernels crash the process on a CPU.
    """
    dims = list(range(x.ndim - len(normalized_shape), x.ndim))
    normal = _normalise(flow, x, dims, eps)
    if weight is not None:
        normal = normal * weight
    return normal if bias is None else normal + bias


def group_norm(
    flow: Any,
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: ARG001
) -> Any:
    """Normalise x [B, C, ...] over each group of channels; OneFlow has a kernel on GPUs only."""
    batch, channels, *rest = x.shape
    if x.is_cuda and weight is not None and bias is not None:
        return flow._C.group_norm(x, weight, bias, True, num_groups, eps)
    groups = x.reshape(batch, num_groups, channels // num_groups * prod(rest))
    normal = _normalise(flow, groups, [2], eps).reshape(*x.shape)
    of_channels = [1, channels] + [1] * len(rest)
    if weight is not None:
        normal = normal * weight.reshape(*of_channels)
    return normal if bias is None else normal + bias.reshape(*of_channels)


def _normalise(flow: Any, x: Any, dims: list[int], eps: float) -> Any:
    if x.is_cuda:
        axis = dims[0]
        return flow._C.layer_norm(x, begin_norm_axis=axis, begin_params_axis=axis, epsilon=eps)
    if x.dtype in (flow.float16, flow.bfloat16):  # OneFlow's own message says "no floating type"
        name = str(x.dtype).removeprefix("oneflow.")
        raise BackendError(f"OneFlow has no kernel for norms in {name} on this CPU")
    mean = x.mean(dim=dims, keepdim=True)
    variance = x.var(dim=dims, unbiased=False, keepdim=True)
    return (x - mean) * (variance + eps).rsqrt()


def attention(
    flow: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Scaled dot-product attention: query [..., n, d], key [..., m, d], value [..., m, e]."""
    if is_causal or enable_gqa or dropout_p:
        raise BackendError("attention that is causal, grouped or drops out has no OneFlow form")
    if attn_mask is not None and attn_mask.dtype != query.dtype:
        raise BackendError("attention with a mask of another dtype has no OneFlow form")
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = flow.matmul(query * factor, flow.transpose(key, key.ndim - 2, key.ndim - 1))
    if attn_mask is not None:
        scores = scores + attn_mask
    return flow.matmul(flow.softmax(scores, dim=-1), value)


def linear(flow: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Multiply x [..., in] with weight [out, in]: [..., out]."""
    product = flow._C.matmul(x, weight, transpose_b=True)
    return product if bias is None else product + bias


def conv2d(
    flow: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Any:
    """Convolve x [B, C, H, W] in NCHW order; in NHWC the CPU's kernel is wrong."""
    return flow._C.conv2d(
        x,
        weight,
        bias,
        stride=_pair(stride),
        padding=_pair(padding),
        dilation=_pair(dilation),
        groups=groups,
        channel_pos="channels_first",
    )


def _pair(sizes: Sequence[int]) -> list[int]:
    return [*sizes] * (2 // len(sizes))
