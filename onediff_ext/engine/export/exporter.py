"""From a block to an exported program that takes its weights as arguments."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Hashable, Mapping, Sequence

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn

from onediff_ext.core.errors import ExportError
from onediff_ext.engine.blocks.family import DIM_BOUNDS, BlockCall, BlockFamily, Dims
from onediff_ext.engine.blocks.weight_slots import Layout, layout_of
from onediff_ext.engine.export.autocast import CudaAutocast
from onediff_ext.engine.quantization import Quantization, QuantizedLinears
from onediff_ext.engine.torch_versions import dynamic_dim, quiet_export

Autocast = tuple[str, torch.dtype] | None

# Elements of one image's activation in the outermost blocks of SDXL at 1024x1024.
_HINT_ELEMENTS = 320 * 128 * 128


class BlockFunction(nn.Module):
    """A block as a function of (weights, *inputs); the block is no submodule, so nothing is
    baked into the graph."""

    def __init__(
        self,
        block: nn.Module,
        family: BlockFamily,
        names: Sequence[str],
        statics: Mapping[str, Hashable],
        autocast: Autocast,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        caller = _Caller(block, family, statics)
        object.__setattr__(self, "_caller", caller)
        self._caller: nn.Module
        self._names = [f"block.{name}" for name in names]
        self._autocast, self._quantisation = autocast, quantization

    def forward(self, weights: Sequence[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        linears: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._quantisation is not None:
            computes_in = None if self._autocast is None else self._autocast[1]
            linears = QuantizedLinears(self._quantisation, weights, computes_in)
            weights = weights[: len(self._names)]  # scales stand behind
        named = dict(zip(self._names, weights, strict=True))
        # Tracing under an outer autocast does not record it, so it stands inside.
        with _autocast_context(self._autocast, tensors[0].device), linears:
            output: torch.Tensor = torch.func.functional_call(self._caller, named, tensors)
            return output


class _Caller(nn.Module):
    def __init__(
        self, block: nn.Module, family: BlockFamily, statics: Mapping[str, Hashable]
    ) -> None:
        super().__init__()
        self.block, self._family, self._statics = block, family, statics

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self._family.run(self.block, tensors, self._statics)


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
        names, weights: The block's weights; their shapes become constants.
        call: Gives dtypes, layouts and fixed dims; its sizes do not matter, and its
            tensors may be on the meta device.
        device: Where the block is traced: where it runs, or the CPU.
        examples: From `make_examples`, when they are made already.
        quantisation: Which of the weights are 8-bit copies.

    Raises:
        ExportError: The block cannot be traced, or tracing froze a dim that must vary.
    """
    # Whole-number dims of one tensor must not be taken for those of another that happen to
    # be equal (duck shapes), and a batch of 1 would be taken for a constant.
    import torch.fx.experimental._config as symbolic_config  # its `patch` is made at import

    dynamic = tuple(_dynamic_dims(dims) for dims in call.dims)
    pure = BlockFunction(block, family, names, dict(call.statics), autocast, quantization)
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
        raise ExportError(f"The block cannot be traced: {_first_line(exc)}") from exc
    _check_dims_vary(program, call, len(weights))
    program._example_inputs = None  # would save the weights with the program
    return program


def make_examples(call: BlockCall, device: torch.device) -> list[torch.Tensor]:
    """Tensors of the sizes that a kind's graph is tuned for. They hold no memory."""
    found = []
    for tensor, dims in zip(call.tensors, call.dims, strict=True):
        with torch.inference_mode(False):
            example = _example(tensor, dims, device)
        example.untyped_storage().resize_(0)  # tracing looks at sizes and strides only
        found.append(example)
    return found


def save_program(program: torch.export.ExportedProgram) -> bytes:
    """Serialise an exported block, without any weight."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def load_program(
    serialised: bytes, device: torch.device | None = None
) -> torch.export.ExportedProgram:
    """The inverse of `save_program`.

    Args:
        device: Where it shall run, if not where it was traced.
    """
    from torch.export.passes import move_to_device_pass  # torch < 2.6 has none, and exports nothing

    program = torch.export.load(io.BytesIO(serialised))
    if device is None or all(fake.device.type == device.type for fake in input_fakes(program)):
        return program
    program = move_to_device_pass(program, device)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            module.recompile()  # the pass changes nodes only (torch 2.13)
    return program


def input_fakes(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """The program's inputs as its own fake tensors: weights first, then the block's tensors."""
    nodes = program.graph_module.graph.nodes
    return [node.meta["val"] for node in nodes if node.op == "placeholder"]


def stand_in(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same form on this device that can be traced, which those made under
    inference mode cannot: they have no version counter."""
    if not weight.is_inference() and weight.device == device:
        return weight.detach()
    return outline_of(layout_of(weight), device)


def outline_of(layout: Layout, device: torch.device) -> torch.Tensor:
    """A tensor of this form that can be traced and has no memory."""
    dtype, shape, stride = layout
    with torch.inference_mode(False):
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _example(tensor: torch.Tensor, dims: Dims, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor at the sizes for which a kind's graph is tuned."""
    channels = tensor.shape[1] if tensor.ndim == 4 else tensor.shape[-1]
    shape = [
        n if name is None else _hint(name, channels)
        for n, name in zip(tensor.shape, dims, strict=True)
    ]
    layout = torch.channels_last if is_channels_last(tensor) else torch.contiguous_format
    return torch.empty(shape, dtype=tensor.dtype, device=device, memory_format=layout)


def _hint(name: str, channels: int) -> int:
    """The size that compilers tune for: the same whatever size a user comes with first.

    All hints of one block differ, since a compiler that traces again takes equal hints for
    one symbol: a graph whose example was square then served squares only (torch 2.11).
    """
    if name == "batch":
        return 2
    if name == "context":
        return 77
    cells = max(64, _HINT_ELEMENTS // channels)
    if name == "tokens":
        return cells
    side = max(8, round(math.sqrt(cells) / 8) * 8)
    return side if name == "height" else side + 8


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an image batch [B, C, H, W] in NHWC order."""
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _dynamic_dims(dims: Dims) -> dict[int, object]:
    return {
        i: dynamic_dim(name, *DIM_BOUNDS[name]) for i, name in enumerate(dims) if name is not None
    }


def _check_dims_vary(
    program: torch.export.ExportedProgram, call: BlockCall, weight_count: int
) -> None:
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


def _autocast_context(
    autocast: Autocast, device: torch.device
) -> contextlib.AbstractContextManager[object]:
    if autocast is None:
        return contextlib.nullcontext()
    device_type, dtype = autocast
    if device_type == "cuda" and device.type == "cpu":  # traced for another place
        return CudaAutocast(dtype)
    return torch.autocast(device_type, dtype=dtype)


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return f"{type(exc).__name__}: {lines[0] if lines else 'no message'}"[:300]
