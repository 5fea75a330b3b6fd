"""Compares a graph's output with eager's, within the rounding of the dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# Allowed relative error of a reordered computation, ‖graph - eager‖ / ‖eager‖: ten times the
# errors measured on SD1.5, SD2 and SDXL blocks. A wrong shape, stride or weight has 0.1 and more.
TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
# For a block whose linear layers compute in 8 bits. With three bits of mantissa (fp8) a product
# has an error of 4e-2, its sum with the block's input less. A wrong scale or weight has 3e-1 and
# more.
QUANTIZED_TOLERANCE = 1e-1
# Convolutions in float32 use TF32 on a GPU by default, with three digits. The kernel of a
# convolution, and so its rounding, may differ from call to call.
_TF32_TOLERANCE = 5e-3


@dataclass(frozen=True)
class Comparison:
    """The result of one comparison.

    Args:
        error: Relative error, in the norm over the whole output.
        problem: The difference in plain words, or None when the graph may be used.
        decided: False when eager's own output is NaN or infinite, so nothing is known.
    """

    error: float
    problem: str | None = None
    decided: bool = True


def compare_all(
    graph_outputs: Sequence[torch.Tensor],
    eager_outputs: Sequence[torch.Tensor],
    allowed: float | None = None,
) -> Comparison:
    """Compare each output of a graph with eager's, as `compare` does.

    Args:
        graph_outputs, eager_outputs: In the same order. Another number of outputs is a difference.
        allowed: Relative error; None takes the tolerance of each eager output's dtype.

    Returns:
        The comparison of the output that differs most. It is undecided when one output is.
    """
    if len(graph_outputs) != len(eager_outputs):
        count = f"{len(graph_outputs)} outputs for {len(eager_outputs)}"
        return Comparison(float("inf"), f"gave {count}")
    return worst(
        compare(ours, theirs, allowed)
        for ours, theirs in zip(graph_outputs, eager_outputs, strict=True)
    )


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """Return the comparison that decides about several: a problem, an undecided one, the rest.

    Args:
        comparisons: At least one. Of equal ones the largest error decides.
    """
    return max(comparisons, key=lambda c: (c.problem is not None, not c.decided, c.error))


def compare(
    graph_output: torch.Tensor, eager_output: torch.Tensor, allowed: float | None = None
) -> Comparison:
    """Compare a graph's output with eager's.

    Norms accumulate in float32 or float64, so that large images do not overflow float16.

    Args:
        graph_output, eager_output: Tensors of any shape; other shapes or dtypes are a difference.
        allowed: Relative error; None takes the tolerance of eager's dtype.

    Returns:
        The comparison. It has a problem when the graph alone has NaN. It is undecided when the norm
        of eager's output is NaN or infinite.
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
    """Judge a graph that differs from eager by the exact result.

    The error may be eager's: its GroupNorm in NHWC on a CPU lost four digits on a half-masked
    image (torch 2.13).

    Args:
        graph_output, eager_output: The two outputs, of one shape.
        exact: The same in float64.

    Returns:
        A comparison without a problem when the graph is at least as exact as eager.
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
