"""Exports a block as a program that takes the block's weights as arguments."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

from onediff_ext.core.errors import ExportError
from onediff_ext.core.words import first_line
from onediff_ext.engine.blocks.family import DIM_BOUNDS, BlockCall, BlockFamily, Dims
from onediff_ext.engine.blocks.weight_form import Layout, layout_of
from onediff_ext.engine.export.autocast import CudaAutocast
from onediff_ext.engine.export.disabled_autocast import inline_disabled_autocast
from onediff_ext.engine.export.input_writes import check_input_writes
from onediff_ext.engine.quantization import Quantization
from onediff_ext.engine.quantized_linears import QuantizedLinears
from onediff_ext.engine.torch_versions import dynamic_dim, quiet_export
from onediff_ext.engine.validity.tensor_contents import version_of

# Device type and dtype of an active autocast; None when it is off.
Autocast = tuple[str, torch.dtype] | None

PROMPT_TOKENS = 77
"""What compilers tune for as the length of a prompt."""
# Elements of one image's activation in the outermost blocks of SDXL at 1024x1024.
_HINT_ELEMENTS = 320 * 128 * 128


class BlockFunction(nn.Module):
    """A block as a function of (weights, *inputs).

    The block is not a submodule, so that no weight becomes a constant of the graph.

    Args:
        block: A structural copy (`BlockTree.copy`).
        family: The family of the block.
        names: Names of the weights.
        statics: As `BlockCall.statics`, by name.
        autocast: The autocast to trace with.
        quantization: Which weights are 8-bit copies; None for none.
        dims: Names of the dims of the inputs. Dims of one name are one symbol of the graph, also
            where the block itself does not require it: attention takes as many values as keys.
    """

    def __init__(
        self,
        block: nn.Module,
        family: BlockFamily,
        names: Sequence[str],
        statics: Mapping[str, Hashable],
        autocast: Autocast,
        quantization: Quantization | None = None,
        dims: Sequence[Dims] = (),
    ) -> None:
        super().__init__()
        caller = _Caller(block, family, statics)
        object.__setattr__(self, "_caller", caller)
        self._caller: nn.Module
        self._names = [f"block.{name}" for name in names]
        self._autocast, self._quantization, self._dims = autocast, quantization, dims

    def forward(
        self, weights: Sequence[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compute the block with these weights.

        Args:
            weights: In the order of `names`; with 8-bit copies as `QuantizedWeights.apply` returns.
            tensors: As `BlockCall.tensors`.

        Returns:
            The tensors of the block's output, as `BlockFamily.tensors_of`.
        """
        _tie(tensors, self._dims)
        linears: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._quantization is not None:
            computes_in = None if self._autocast is None else self._autocast[1]
            linears = QuantizedLinears(self._quantization, weights, computes_in)
            weights = weights[: len(self._names)]  # the rest are scales
        named = dict(zip(self._names, weights, strict=True))
        # Tracing does not record an outer autocast, so it is entered here.
        with _autocast_context(self._autocast), linears:
            outputs: tuple[torch.Tensor, ...] = torch.func.functional_call(
                self._caller, named, tensors
            )
            return outputs


def _tie(tensors: Sequence[torch.Tensor], dims: Sequence[Dims]) -> None:
    """Tell tracing that dims of one name are equal."""
    sizes: dict[str, Any] = {}
    for tensor, names in zip(tensors, dims, strict=False):
        for size, name in zip(tensor.shape, names, strict=True):
            if name is not None:
                torch._check(size == sizes.setdefault(name, size))  # type: ignore[no-untyped-call]


class _Caller(nn.Module):
    def __init__(
        self, block: nn.Module, family: BlockFamily, statics: Mapping[str, Hashable]
    ) -> None:
        super().__init__()
        self.block, self._family, self._statics = block, family, statics

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._family.tensors_of(self._family.run(self.block, tensors, self._statics))


def export_block(
    block: nn.Module,
    family: BlockFamily,
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    call: BlockCall,
    device: torch.device,
    autocast: Autocast = None,
    examples: Sequence[torch.Tensor] | None = None,
    quantization: Quantization | None = None,
) -> torch.export.ExportedProgram:
    """Export one block with batch, height, width and tokens symbolic.

    Args:
        block: A structural copy (`BlockTree.copy`), never the live block.
        family: The family of the block.
        names, weights: The block's weights. Their shapes become constants.
        call: A call as the graph takes it. Its dtypes, layouts and fixed dims count, its sizes do
            not; the tensors may be on the meta device.
        device: Where the block is traced: its own device, or the CPU.
        autocast: The autocast to trace with.
        examples: From `make_examples`; None makes them.
        quantization: Which of the weights are 8-bit copies; None for none.

    Returns:
        A program that takes (weights, *tensors of the call).

    Raises:
        ExportError: The block cannot be traced or writes into its arguments, or tracing froze a dim
            that must vary.
    """
    # Without duck shapes, dims of two tensors that happen to be equal are separate symbols, and a
    # batch of 1 is no constant.
    import torch.fx.experimental._config as symbolic_config  # adds `patch` when imported

    dynamic = tuple(_dynamic_dims(dims) for dims in call.dims)
    statics = dict(call.statics)
    pure = BlockFunction(block, family, names, statics, autocast, quantization, call.dims)
    try:
        with (
            torch.inference_mode(False),  # hosts build in the middle of their sampling
            torch.no_grad(),
            quiet_export(),
            symbolic_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            program = torch.export.export(
                pure,
                (
                    [stand_in(w, w.device) for w in weights],
                    *(examples or make_examples(call, device)),
                ),
                dynamic_shapes=([None] * len(weights), dynamic),
                strict=False,
            )
    except Exception as exc:  # torch.export raises dozens of unrelated types
        reason = f"{type(exc).__name__}: {first_line(str(exc))}"[:300]
        raise ExportError(f"The block cannot be traced: {reason}") from exc
    inline_disabled_autocast(program.graph_module)
    check_input_writes(program)
    _check_dims_vary(program, call, len(weights))
    program._example_inputs = None  # would save the weights with the program
    return program


def make_examples(call: BlockCall, device: torch.device) -> list[torch.Tensor]:
    """Return tensors without memory, of the sizes that a kind's graph is tuned for.

    Args:
        call: A call as the graph takes it.
        device: Where the block is traced.
    """
    found = []
    sizes: dict[str, int] = {}
    for tensor, dims in zip(call.tensors, call.dims, strict=True):
        with torch.inference_mode(False):
            example = _example(tensor, dims, sizes, device)
        example.untyped_storage().resize_(0)  # tracing reads only sizes and strides
        found.append(example)
    return found


def save_program(program: torch.export.ExportedProgram) -> bytes:
    """Serialise an exported block.

    Args:
        program: From `export_block`.

    Returns:
        The bytes of ``torch.export.save``, without any weight.
    """
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def load_program(
    serialised: bytes, device: torch.device | None = None
) -> torch.export.ExportedProgram:
    """Load what `save_program` returned.

    Args:
        serialised: From `save_program`.
        device: Where the program shall run, of any number if it has none; None for where it was
            traced.

    Returns:
        The program, with its fake inputs on that device.
    """
    from torch.export.passes import move_to_device_pass  # new in torch 2.6

    program = torch.export.load(io.BytesIO(serialised))
    if device is None or all(_is_on(device, fake) for fake in input_fakes(program)):
        return program
    program = move_to_device_pass(program, device)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            module.recompile()  # the pass changes only the nodes (torch 2.13)
    return program


def _is_on(device: torch.device, tensor: torch.Tensor) -> bool:
    same_type = tensor.device.type == device.type
    return same_type and device.index in (None, tensor.device.index)


def input_fakes(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """Return the program's inputs as its own fake tensors: weights, then the call's tensors.

    Args:
        program: An exported block.
    """
    nodes = program.graph_module.graph.nodes
    return [node.meta["val"] for node in nodes if node.op == "placeholder"]


def stand_in(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the weight's form on this device that can be traced.

    A tensor without a version counter cannot be traced.

    Args:
        weight: Of any shape.
        device: Where the block is traced.

    Returns:
        The weight itself, detached, where it can be traced; else a tensor without memory.
    """
    if version_of(weight) >= 0 and weight.device == device:
        return weight.detach()
    return outline_of(layout_of(weight), device)


def outline_of(layout: Layout, device: torch.device) -> torch.Tensor:
    """Return a tensor of this layout that can be traced and has no memory.

    Args:
        layout: Dtype, shape and strides in elements.
        device: Where the block is traced.
    """
    dtype, shape, stride = layout
    with torch.inference_mode(False):
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _example(
    tensor: torch.Tensor, dims: Dims, sizes: dict[str, int], device: torch.device
) -> torch.Tensor:
    """Return an uninitialised tensor of the sizes that a kind's graph is tuned for.

    Args:
        tensor, dims: Of the call.
        sizes: Size of each dim by its name; the call's first tensor with a dim decides it.
        device: Where the block is traced.
    """
    channels = tensor.shape[1] if tensor.ndim == 4 else tensor.shape[-1]
    shape = [
        n if name is None else sizes.setdefault(name, _hint(name, channels))
        for n, name in zip(tensor.shape, dims, strict=True)
    ]
    layout = torch.channels_last if is_channels_last(tensor) else torch.contiguous_format
    return torch.empty(shape, dtype=tensor.dtype, device=device, memory_format=layout)


def _hint(name: str, channels: int) -> int:
    """Return the size that compilers tune for, which does not depend on the user's first size.

    All hints of one block differ. A compiler that traces again takes equal hints for one symbol: a
    graph with a square example then served only squares (torch 2.11).

    Args:
        name: Name of the dim.
        channels: Channels of the image, or width of the tokens.
    """
    if name == "batch":
        return 2
    if name == "context":
        return PROMPT_TOKENS
    cells = max(64, _HINT_ELEMENTS // channels)
    if name == "tokens":
        return cells
    side = max(8, round(math.sqrt(cells) / 8) * 8)
    return side if name == "height" else side + 8


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an image batch [B, C, H, W] in NHWC order.

    Args:
        tensor: Of any shape.
    """
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _dynamic_dims(dims: Dims) -> dict[int, object]:
    return {
        i: dynamic_dim(name, *DIM_BOUNDS[name]) for i, name in enumerate(dims) if name is not None
    }


def _check_dims_vary(
    program: torch.export.ExportedProgram, call: BlockCall, weight_count: int
) -> None:
    """Raise `ExportError` when a dim that must vary became a constant or another dim's symbol."""
    names: dict[sympy.Basic, str] = {}
    for fake, dims in zip(input_fakes(program)[weight_count:], call.dims, strict=True):
        for size, name in zip(fake.shape, dims, strict=True):
            if name is None:
                continue
            symbol = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if not isinstance(symbol, sympy.Symbol):
                raise ExportError(f"Tracing froze {name} to {symbol}.")
            if names.setdefault(symbol, name) != name:
                raise ExportError(f"Tracing took {name} for {names[symbol]}.")
            bounds = program.range_constraints[symbol]
            if bounds.lower > 2 or bounds.upper < DIM_BOUNDS[name][1]:
                raise ExportError(f"Tracing narrowed {name} to {bounds.lower}..{bounds.upper}.")


def _autocast_context(autocast: Autocast) -> contextlib.AbstractContextManager[object]:
    if autocast is None:
        return contextlib.nullcontext()
    device_type, dtype = autocast
    if device_type == "cuda":  # traced on the CPU or not: a graph with a real one cannot be saved
        return CudaAutocast(dtype)
    return torch.autocast(device_type, dtype=dtype)
