"""Whether a graph's result is eager's result, within what the dtype's rounding explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Relative error allowed to a reordered computation, ‖graph - eager‖ / ‖eager‖. Ten times what
# was seen on SD1.5, SD2 and SDXL blocks; a wrong shape, stride or weight gives 0.1 and more.
TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
# A block whose linear layers compute in 8 bits. With three binary digits of mantissa (fp8) each
# product has an error of 4e-2, the sum with the block's input less; a wrong scale or weight gives
# 3e-1 and more.
QUANTIZED_TOLERANCE = 1e-1
# Convolutions in float32 use TF32 on a GPU unless told otherwise, with three digits; which
# kernel takes a convolution, and with it the rounding, may differ from call to call.
_TF32_TOLERANCE = 5e-3


@dataclass(frozen=True)
class Comparison:
    """The outcome of one check.

    Args:
        error: Relative error, in the norm over the whole output.
        problem: What is wrong, or None when the graph may be used.
        decided: False when eager's own result is unusable (NaN), so nothing was learnt.
    """

    error: float
    problem: str | None = None
    decided: bool = True


def compare(
    graph_output: torch.Tensor, eager_output: torch.Tensor, allowed: float | None = None
) -> Comparison:
    """Compare a graph's output with eager's, within `allowed` or what the dtype explains.

    Both are of one shape and dtype when all is well; accumulation is in float32
    or better, so that large images do not overflow float16.
    """
    if graph_output.shape != eager_output.shape or graph_output.dtype != eager_output.dtype:
        return Comparison(float("inf"), f"gave {_form(graph_output)} for {_form(eager_output)}")
    wide = torch.float64 if eager_output.dtype == torch.float64 else torch.float32
    eager = eager_output.detach().to(wide)
    scale = torch.linalg.vector_norm(eager).item()
    if scale != scale or scale == float("inf"):
        return Comparison(float("nan"), decided=False)
    difference = torch.linalg.vector_norm(graph_output.detach().to(wide) - eager).item()
    if difference != difference:
        return Comparison(float("nan"), "gave NaN where eager does not")
    error = difference / scale if scale > 0 else difference
    allowed = _tolerance(eager_output) if allowed is None else allowed
    if error > allowed:
        return Comparison(error, f"differs from eager by {error:.1e}, allowed {allowed:.0e}")
    return Comparison(error)


def _tolerance(eager_output: torch.Tensor) -> float:
    if eager_output.is_cuda and eager_output.dtype == torch.float32 and _tf32_is_on():
        return _TF32_TOLERANCE
    return TOLERANCE.get(eager_output.dtype, 1e-2)


def _tf32_is_on() -> bool:
    return torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"


def as_exact_as(
    graph_output: torch.Tensor, eager_output: torch.Tensor, exact: torch.Tensor
) -> Comparison:
    """Judge a graph that differs from eager by the result in float64.

    Eager's own kernels can be the ones that are off: GroupNorm in NHWC on a CPU lost four
    digits on a half-masked picture (torch 2.13), which a graph must not be blamed for.
    """
    wide, ours, theirs = exact.double(), graph_output.double(), eager_output.double()
    scale = torch.linalg.vector_norm(wide).item()
    error = torch.linalg.vector_norm(ours - wide).item() / scale
    eager_error = torch.linalg.vector_norm(theirs - wide).item() / scale
    if error <= eager_error:
        return Comparison(error)
    return Comparison(error, f"is off by {error:.1e} where eager is by {eager_error:.1e}")


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
