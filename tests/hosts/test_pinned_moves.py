"""Moves of whole models through pinned memory: exact, and for nobody else to see."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from onediff_ext.engine.patches import Patches
from onediff_ext.hosts import pinned_memory, pinned_moves
from onediff_ext.hosts.a1111.lowvram import bring_to_gpu, moved_models
from onediff_ext.hosts.forge_memory import MemoryFunctions, StreamedLayers
from onediff_ext.hosts.neo.package import NEO
from onediff_ext.hosts.pinned_memory import PINNED_MEMORY, SPARE_BYTES, PinnedMemory
from onediff_ext.hosts.pinned_moves import PinnedMoves, device_it_moves_to, use_pinned_memory
from tests.support.forge_lora_stand_in import StreamedLora
from tests.support.forge_stand_in import running

SIZE = 160  # of layers
GPU = torch.device("cuda", 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.conv = nn.Conv2d(64, 96, 3).to(memory_format=torch.channels_last)
        self.tied = nn.Linear(SIZE, SIZE)
        self.tied.weight = self.linear.weight
        self.register_buffer("table", torch.randn(2**14))


def layer() -> nn.Linear:
    return nn.Linear(SIZE, SIZE, bias=False)


def numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = numbers(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def places(model: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in model.state_dict().values()}


@pytest.fixture
def moved() -> Iterator[Model]:
    """A model whose moves go through pinned memory."""
    model = Model()
    with Patches() as patches:
        use_pinned_memory(PinnedMoves(), patches, [model])
        assert "to" in vars(model)
        use_pinned_memory(PinnedMoves(), patches, [model])  # of the next job
        yield model
    assert "to" not in vars(model)


# ------------------------------------------------------------------ anywhere


def test_other_calls_are_those_of_the_class(moved: Model) -> None:
    expected = numbers(moved)
    assert moved.to("cpu") is moved
    assert_same(moved, expected)
    moved.to(torch.float64)
    assert moved.linear.weight.dtype == torch.float64
    moved.to(device="meta")
    assert places(moved) == {"meta"}
    with pytest.raises(TypeError):
        moved.to("nowhere", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("device", "args", "kwargs"),
    [
        ("cpu", ("cpu",), {}),
        ("cpu", (torch.device("cpu"), None, False), {}),
        ("cpu", ("cpu", torch.float32, False, True), {}),  # a copy in any case
        ("cpu", (), {"device": "cpu", "copy": True, "non_blocking": True}),
        ("cpu", ("cpu",), {"memory_format": torch.preserve_format}),
        ("cuda:1", ("cuda:1",), {}),
        ("cuda:1", (), {"device": torch.device("cuda:1"), "dtype": torch.float32}),
        (None, ("cpu",), {"memory_format": torch.channels_last}),
        (None, ("cpu", torch.float16), {}),
        (None, (), {"device": "cuda:1", "dtype": torch.float16}),
        (None, (torch.float32, False, True), {}),
        (None, (torch.empty(1), False, True), {}),
        (None, (), {"dtype": torch.float32}),
        (None, (0,), {}),
    ],
)
def test_which_moves_are_plain_ones(
    device: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    expected = None if device is None else torch.device(device)
    assert device_it_moves_to(torch.float32, *args, **kwargs) == expected


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A GPU that reads as slowly as can be, and all of main memory ours.

    Returns:
        Each device that was waited for.
    """
    seen: list[torch.device] = []

    def stream_of(device: torch.device) -> Any:
        return _Stream(device, seen.append)

    monkeypatch.setattr(pinned_moves, "GPU_TYPE", "meta")
    monkeypatch.setattr(pinned_moves, "_current_stream", stream_of)
    monkeypatch.setattr(PinnedMemory, "holds", lambda *_: True)
    return seen


@dataclass(frozen=True)
class _Stream:
    device: torch.device
    wait: Callable[[torch.device], None] = field(compare=False)

    def synchronize(self) -> None:
        self.wait(self.device)


def test_a_model_on_its_way_to_the_gpu_is_waited_for_once(waited_for: list[torch.device]) -> None:
    model, moves = Model(), PinnedMoves()
    with moves:
        with moves:  # as hosts nest them
            model.to("meta")
        assert waited_for == []
    assert [device.type for device in waited_for] == ["meta"]
    assert places(model) == {"meta"}
    with moves:
        Model().to(torch.float16)
    assert len(waited_for) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t.__setitem__(0, 1),
        lambda t: t.copy_(torch.zeros(4)),
        lambda t: torch.add(t, t, out=t),
        lambda t: t.numpy(),  # NumPy can write to it
        lambda t: nn.init.zeros_(t),
        lambda t: t.untyped_storage(),
        lambda t: t.data_ptr(),
        lambda t: t.to(torch.float16),
    ],
)
def test_what_could_write_to_main_memory_waits_until_the_gpu_has_read_it(
    waited_for: list[torch.device], write: Callable[[torch.Tensor], object]
) -> None:
    tensor = torch.ones(4)
    with PinnedMoves():
        tensor.to("meta")
        assert tensor.numel() == 4
        assert tensor.data.device.type == "cpu"
        assert waited_for == []
        write(tensor)
        assert len(waited_for) == 1
        write(tensor)  # there is nothing more to wait for
    assert len(waited_for) == 1


@pytest.fixture
def modes() -> list[list[type]]:
    """The function modes in which each module of class `Watched` has moved."""
    return []


class Watched(nn.Linear):
    def __init__(self, modes: list[list[type]]) -> None:
        super().__init__(2, 2)
        self.modes = modes

    def children(self) -> Iterator[nn.Module]:
        """torch asks for them when it moves a module."""
        self.modes.append([type(mode) for mode in _get_current_function_mode_stack()])
        return super().children()


def test_modules_move_outside_of_the_mode(
    waited_for: list[torch.device], modes: list[list[type]]
) -> None:
    """A mode sees every function of every tensor."""
    module, torch_to = Watched(modes), nn.Module.to
    with PinnedMoves() as moves:
        with moves:
            assert module.to(torch.device("meta")) is module
            assert module.to(device="meta", non_blocking=True) is module
        assert nn.Module.to is not torch_to
    assert nn.Module.to is torch_to
    assert modes == [[], []]
    assert module.weight.is_meta
    assert len(waited_for) == 1


class Mode(TorchFunctionMode):
    """As that of ``with torch.device(...)``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class OwnApply(nn.Linear):
    def _apply(self, fn: Any, recurse: bool = True) -> OwnApply:
        before = self.weight.detach()
        super()._apply(fn, recurse)
        before.add_(1)
        return self


def test_a_mode_of_somebody_else_sees_each_move(modes: list[list[type]]) -> None:
    module = Watched(modes)
    with PinnedMoves(), Mode():
        module.to("meta")
    assert modes == [[PinnedMoves, Mode]]


def test_a_module_that_moves_in_its_own_way_is_waited_for(waited_for: list[torch.device]) -> None:
    with PinnedMoves():
        nn.Sequential(nn.Linear(2, 2), OwnApply(2, 2)).to("meta")
        assert len(waited_for) == 2  # for the first module, and before the second is written to
    own = nn.Linear(2, 2)
    own._apply = OwnApply(2, 2)._apply  # type: ignore[method-assign]
    with PinnedMoves():
        own.to("meta")
        assert own.weight.device.type == "cpu"


def test_a_tensor_of_another_class_may_do_anything(waited_for: list[torch.device]) -> None:
    class Packed(torch.Tensor):
        """As quantized weights are."""

    module = nn.Linear(2, 2)
    module.register_buffer("packed", torch.ones(2).as_subclass(Packed))
    with PinnedMoves():
        module.to("meta")
        assert len(waited_for) == 1
    assert type(module.packed) is Packed


def test_without_numbers_torch_says_what_to_do() -> None:
    with PinnedMoves(), pytest.raises(NotImplementedError, match="to_empty"):
        nn.Linear(2, 2, device="meta").to("cpu")


def test_other_calls_of_modules_are_those_of_torch() -> None:
    module = nn.Linear(2, 2)
    with PinnedMoves():
        assert module.to("cpu", torch.float64).weight.dtype == torch.float64
        assert module.to(torch.float32).weight.dtype == torch.float32
        assert module.to(torch.empty(1, dtype=torch.float16)).weight.dtype == torch.float16
        with pytest.raises(RuntimeError, match="copy"):
            module.to("cpu", copy=True)
        with pytest.raises(RuntimeError, match="nowhere"):
            module.to("nowhere")


def test_threads_and_other_patches_of_modules(modes: list[list[type]]) -> None:
    torch_to, seen = nn.Module.to, []

    def others_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        seen.append(args)
        return before(module, *args, **kwargs)

    with ThreadPoolExecutor(1) as thread:
        with PinnedMoves() as moves:
            Watched(modes).to("cpu")
            thread.submit(lambda: Watched(modes).to("cpu")).result()  # in no block
            other = PinnedMoves()
            thread.submit(other.__enter__).result()
            before, nn.Module.to = nn.Module.to, others_to  # type: ignore[assignment]
            Watched(modes).to("cpu")
        assert moves is not other
        thread.submit(lambda: Watched(modes).to("cpu")).result()
        thread.submit(other.__exit__, None, None, None).result()
    assert nn.Module.to is others_to  # it stays where it is, and works
    with PinnedMoves():
        Watched(modes).to("cpu")
        assert nn.Module.to is not others_to
    assert nn.Module.to is others_to
    Watched(modes).to("cpu")
    nn.Module.to = torch_to  # type: ignore[method-assign]
    assert seen == [("cpu",)] * 3
    assert modes == [[]] * 6


def test_each_thread_waits_for_its_own_moves(waited_for: list[torch.device]) -> None:
    moves, tensor = PinnedMoves(), torch.ones(4)
    with ThreadPoolExecutor(1) as thread, moves:
        thread.submit(moves.__enter__).result()
        thread.submit(tensor.to, "meta").result()
        tensor.add_(1)
        assert waited_for == []
        thread.submit(moves.__exit__, None, None, None).result()
        assert len(waited_for) == 1
    assert len(waited_for) == 1


def test_a_move_that_fails_does_not_fail_the_next(waited_for: list[torch.device]) -> None:
    model = nn.Linear(2, 2)
    with PinnedMoves():
        with pytest.raises((RuntimeError, AssertionError)):
            model.to("xpu")
        model.to("meta")
    assert [device.type for device in waited_for] == ["meta"]


def test_a_wait_that_fails_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(device: torch.device) -> None:
        raise RuntimeError(f"{device} is gone")

    monkeypatch.setattr(pinned_moves, "GPU_TYPE", "meta")
    monkeypatch.setattr(pinned_moves, "_current_stream", lambda device: _Stream(device, wait))
    monkeypatch.setattr(PinnedMemory, "holds", lambda *_: True)
    moves = PinnedMoves()
    with pytest.raises(RuntimeError, match="gone"), moves:
        nn.Linear(2, 2).to("meta")
    with moves:
        torch.ones(2).add_(1)


def test_only_our_own_memory_is_read_while_python_goes_on(
    monkeypatch: pytest.MonkeyPatch, waited_for: list[torch.device]
) -> None:
    """Memory that the host has pinned by itself may be freed meanwhile."""
    monkeypatch.setattr(PinnedMemory, "holds", lambda *_: False)
    with PinnedMoves():
        nn.Linear(2, 2).to("meta")
        torch.ones(2).to("meta")
    assert waited_for == []


class Buffer(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((64,), value))


def test_a_module_that_is_reached_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors die while a module moves, and others get their `id`."""
    to, copies = torch.Tensor.to, 0

    def copied(_: PinnedMemory, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal copies
        copies += 1
        return tensor.clone() if copies <= 20 else None  # no more time for pinning

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.clone() if args == (torch.device("cpu"),) else to(tensor, *args, **kwargs)

    shared = nn.ModuleList(Buffer(1000.0 + number) for number in range(20))
    model = nn.Sequential(*map(Buffer, range(20)), nn.Sequential(shared), nn.Sequential(shared))
    monkeypatch.setattr(pinned_moves, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(pinned_moves, "_current_stream", lambda device: _Stream(device, print))
    monkeypatch.setattr(PinnedMemory, "copy", copied)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    with PinnedMoves():
        model.to("cpu")
    assert copies == 40
    assert [float(each.table[0]) for each in shared] == [1000.0 + number for number in range(20)]


def test_a_copy_of_a_model_moves_itself() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))  # copies its own attributes
    with Patches() as patches:
        use_pinned_memory(PinnedMoves(), patches, [model])
        copied = copy.deepcopy(model)
        assert copied.to(torch.float64) is copied
    assert {weight.dtype for weight in copied.parameters()} == {torch.float64}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_with_numbers_of_another_kind_move_by_themselves() -> None:
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert PinnedMoves().pin([quantized, nested], GPU) == 0
    with PinnedMoves():
        assert quantized.to("cpu") is quantized
        assert nested.to("cpu") is nested


def test_an_error_on_the_way_waits_too(waited_for: list[torch.device]) -> None:
    with pytest.raises(RuntimeError), PinnedMoves():
        torch.ones(4).to("meta").item()
    assert len(waited_for) == 1


# ------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["ours", "pinned", "ordinary"])
@torch.no_grad()
def test_the_gpu_gets_the_numbers_that_were_there(place: str) -> None:
    """The GPU is busy, so the next line writes to the weight before the GPU has read it."""
    weight = torch.full((2**27,), 3, dtype=torch.uint8)
    if place == "ours":
        copied = PINNED_MEMORY.copy(weight, GPU)
        assert copied is not None
        weight = copied
    elif place == "pinned":
        weight = weight.pin_memory()
    busy = torch.randn(8192, 8192, device=GPU)
    with PinnedMoves():
        for _ in range(8):
            busy = busy @ busy
        moved = weight.to(GPU)
        weight.fill_(7)
    assert bool((moved == 3).all())
    assert bool((weight == 7).all())


def pinned(model: nn.Module) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if tensor.is_pinned()}


@pytest.mark.gpu
def test_a_model_goes_there_and_back(moved: Model) -> None:
    expected = numbers(moved)
    strides = {name: tensor.stride() for name, tensor in moved.state_dict().items()}
    weight = moved.linear.weight
    for _ in range(3):
        moved.to(GPU)
        assert places(moved) == {"cuda"}
        assert_same(moved, expected)
        moved.to("cpu")
        assert places(moved) == {"cpu"}
        assert_same(moved, expected)
        assert pinned(moved) == set(expected)
        assert moved.linear.weight is weight is moved.tied.weight
        assert strides == {name: tensor.stride() for name, tensor in moved.state_dict().items()}


@pytest.mark.gpu
def test_nobody_sees_a_copy_before_the_gpu_has_written_it(moved: Model) -> None:
    """The GPU is busy when the move begins. Another thread, without a mode, looks on."""
    moved.to(GPU)
    expected, busy = numbers(moved), torch.randn(8192, 8192, device=GPU)
    for _ in range(8):
        busy = busy @ busy
    weight, table = moved.linear.weight, moved.table
    seen: list[bool] = []

    def look() -> None:
        while weight.device.type != "cpu":
            time.sleep(0)
        seen.append(torch.equal(weight, expected["linear.weight"]))

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        moved.to("cpu")
        looking.result()
    assert seen == [True]
    assert_same(moved, expected)
    assert table.device.type == "cuda"


@pytest.mark.gpu
def test_gradients_and_buffers_that_need_them_move_as_without() -> None:
    def made() -> nn.Module:
        module = nn.Linear(SIZE, SIZE, device=GPU)
        module(torch.ones(1, SIZE, device=GPU)).sum().backward()
        module.register_buffer("state", torch.ones(4, device=GPU, requires_grad=True))
        return module

    for device in ("cpu", GPU):
        plain, module = made().to(device), made()
        with PinnedMoves():
            module.to(device)
        for one, other in zip((plain, module), (module, plain), strict=True):
            assert one.weight.grad.device == other.weight.device
            assert torch.equal(one.weight.grad, other.weight.grad)
            assert one.state.requires_grad
            assert one.state.grad_fn is None or other.state.grad_fn is not None


@pytest.mark.gpu
def test_pinning_is_spread_over_several_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "PINNING_LIMIT_S", 1e-9)
    monkeypatch.setattr(pinned_memory, "CHUNK_BYTES", SIZE * SIZE * 4)
    model, moves = nn.Sequential(*(layer() for _ in range(3))), PinnedMoves(PinnedMemory())
    expected = numbers(model)
    for count in (1, 2, 3, 3):
        with moves:
            model.to(GPU)
        with moves:
            with moves:  # as hosts nest them
                model[0].to("cpu")
            model.to("cpu")
        assert len(pinned(model)) == count
        assert_same(model, expected)


@pytest.mark.gpu
def test_writes_of_any_kind_come_back(moved: Model) -> None:
    moved.to(GPU)
    with torch.no_grad():
        moved.linear.weight.add_(1)
        moved.conv.weight.data.mul_(2)  # torch does not count it
        moved.linear.bias.data = torch.ones(SIZE, device=GPU)
        moved.table.add_(3)
    expected = numbers(moved)
    moved.to("cpu")
    assert_same(moved, expected)
    with torch.no_grad():
        moved.linear.weight.sub_(4)
        moved.conv.weight.data = torch.randn_like(moved.conv.weight)
    expected = numbers(moved)
    moved.to(GPU)
    assert_same(moved, expected)


@pytest.mark.gpu
def test_who_keeps_a_reference_sees_no_later_numbers(moved: Model) -> None:
    for place in ("cpu", GPU, "cpu"):
        moved.to(place)
    kept = {name: tensor.detach() for name, tensor in moved.state_dict().items()}
    before = {name: tensor.clone() for name, tensor in kept.items()}
    moved.to(GPU)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.add_(1)
    expected = numbers(moved)
    moved.to("cpu")
    assert_same(moved, expected)
    assert all(torch.equal(kept[name], before[name]) for name in kept)


@pytest.mark.gpu
def test_weights_that_changed_their_form_meanwhile(moved: Model) -> None:
    moved.to(GPU)
    moved.linear.weight.data = moved.linear.weight.data.t()
    moved.conv.weight = nn.Parameter(torch.randn(6, 4, 64, 64, device=GPU)[:, :, ::2])
    moved.linear.bias.data = torch.ones(2**16, dtype=torch.float64, device=GPU).expand(2, -1)
    expected = numbers(moved)
    plain = {name: tensor.to("cpu") for name, tensor in moved.state_dict().items()}
    moved.to("cpu")
    assert_same(moved, expected)
    for name, tensor in moved.state_dict().items():
        assert tensor.stride() == plain[name].stride()
    moved.to(GPU)
    assert_same(moved, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("available_bytes", [2**20, SPARE_BYTES + 2**17])
def test_nothing_is_pinned_without_enough_main_memory(available_bytes: int) -> None:
    model = Model().to(GPU)
    expected = numbers(model)
    with PinnedMoves(PinnedMemory(lambda: available_bytes)):
        model.to("cpu")
    assert pinned(model) == set()
    assert_same(model, expected)


@pytest.mark.gpu
def test_inside_of_inference_mode(moved: Model) -> None:
    """Hosts call it in the middle of their sampling."""
    expected, plain = numbers(moved), Model()
    for place in (GPU, "cpu", GPU):
        with torch.inference_mode():
            moved.to(place)
            plain.to(place)
        assert moved.linear.weight.is_inference() == plain.linear.weight.is_inference()
        assert_same(moved, expected)


@pytest.mark.gpu
def test_tensors_of_all_kinds_move_as_without() -> None:
    big = torch.randn(256, 256, device=GPU)
    moves: list[Any] = [
        lambda t: t.to("cpu"),
        lambda t: t.to(device="cpu", copy=True),
        lambda t: t.to(torch.device("cpu"), torch.float32, False),
        lambda t: t.to("cpu", torch.float32, False, True),
        lambda t: t.to(torch.float16, False, True),
        lambda t: t.to("cpu", torch.float16),
        lambda t: t.to(torch.float16),
        lambda t: t.to(torch.empty(1)),
        lambda t: t.to("cpu", memory_format=torch.contiguous_format),
        lambda t: t.to(GPU),
    ]
    tensors = [big, big.t(), big[::2], big[:1, :1], nn.Parameter(big), big.to_sparse()]
    for move in moves:
        for tensor in tensors:
            if tensor.is_sparse and move is moves[-2]:
                continue
            with torch.no_grad():
                expected = move(tensor)
                with PinnedMoves():
                    found = move(tensor)
            assert type(found) is type(expected)
            assert (found.device, found.dtype) == (expected.device, expected.dtype)
            assert found.requires_grad == expected.requires_grad
            assert torch.equal(found.to_dense(), expected.to_dense())
            assert tensor.is_sparse or found.stride() == expected.stride()
    with PinnedMoves():
        assert nn.Parameter(big).to("cpu").grad_fn is not None


# ------------------------------------------------------------------ Forge and its descendants


def forge_memory(seen: list[Any], *models: nn.Module, device: torch.device = GPU) -> Any:
    """As much of ``backend.memory_management`` as moves need; `seen` gets its calls."""
    memory: Any = ModuleType("memory_management")
    memory.current_loaded_models = [
        SimpleNamespace(device=device, model=SimpleNamespace(model=model)) for model in models
    ]

    def load_models_gpu(*args: Any, **kwargs: Any) -> str:
        modes = _get_current_function_mode_stack()
        seen.append((args, kwargs, [type(mode) for mode in modes]))
        return "loaded"

    memory.load_models_gpu = memory.free_memory = load_models_gpu
    return memory


def test_moves_of_forge_go_through_it() -> None:
    seen: list[Any] = []
    memory, moves = forge_memory(seen), PinnedMoves()
    before = memory.load_models_gpu
    with Patches() as patches:
        MemoryFunctions(moves, StreamedLayers(moves)).speed_up_moves(memory, patches)
        assert memory.load_models_gpu([1], force=True) == "loaded"
        assert memory.free_memory(5, GPU) == "loaded"
    assert memory.load_models_gpu is memory.free_memory is before
    assert seen == [(([1],), {"force": True}, [PinnedMoves]), ((5, GPU), {}, [PinnedMoves])]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pinned memory and a GPU to wait for, where there is no GPU."""
    seen: list[str] = []
    known: set[int] = set()

    def pinned_copy(_: PinnedMemory, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied = tensor.clone()
        known.add(copied.data_ptr())
        seen.append("pinned")
        return copied

    monkeypatch.setattr(PinnedMemory, "copy", pinned_copy)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in known)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stream = _Stream(GPU, lambda _: seen.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", {GPU: stream}.get)
    # It would end a recording of another thread.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for all of it"))
    return seen


def test_layers_that_forge_streams_are_pinned_when_it_has_loaded(waits: list[str]) -> None:
    model, moves = Model(), PinnedMoves()
    expected, weight = numbers(model), model.linear.weight
    memory, streamed = forge_memory([], model), StreamedLayers(moves)
    with Patches() as patches:
        MemoryFunctions(moves, streamed).speed_up_moves(memory, patches)
        streamed.wait()
        memory.free_memory(5, GPU)
        assert waits == []  # nothing was pinned yet
        memory.load_models_gpu([model])
        assert waits == ["pinned"] * 5
        memory.load_models_gpu([model])
        streamed.wait()
        assert waits[5:] == ["waited"] * 2
        assert_same(model, expected)
        assert model.linear.weight is weight is model.tied.weight
        memory.current_loaded_models.clear()
        memory.load_models_gpu([])
        memory.free_memory(5, GPU)
    assert waits[7:] == ["waited"]  # the last move that could write to them


def test_loras_that_streamed_layers_apply_at_each_call_are_pinned(waits: list[str]) -> None:
    with running("neo") as host:
        lora = StreamedLora(host.name)
        lora.add(host.unet, "transformer.ff.out")
        (rule,) = NEO.weight_functions
        streamed = StreamedLayers(PinnedMoves(), NEO.weight_functions)
        streamed.pin(forge_memory([], host.unet))
        assert waits == ["pinned"] * len(list(host.unet.parameters()))
        waits.clear()
        lora.switch(host.unet, on=True)
        streamed.pin(forge_memory([], host.unet))
        assert waits == ["pinned"] * 2
        assert {id(each) for each in rule.tensors(host.unet)} == set(map(id, lora.tensors()))


def test_a_step_waits_only_for_layers_of_its_own_model(waits: list[str]) -> None:
    """A text encoder that the host has left in main memory does not slow the steps down."""

    class Packed(torch.Tensor):
        """As quantized weights are: not everything can be asked of them."""

        def is_pinned(self, *_: Any) -> bool:
            raise NotImplementedError

    unet, text_encoder = nn.Linear(SIZE, SIZE), Model()
    unet.bias = nn.Parameter(torch.randn(SIZE).as_subclass(Packed))
    moves, memory = PinnedMoves(), forge_memory([], text_encoder)
    streamed = StreamedLayers(moves)
    unet.register_forward_hook(streamed.wait)
    with Patches() as patches:
        MemoryFunctions(moves, streamed).speed_up_moves(memory, patches)
        memory.load_models_gpu([text_encoder])
        waits.clear()
        for _ in range(3):
            unet(torch.randn(1, SIZE))
        assert waits == []
        streamed.wait()  # before a move
        assert waits == ["waited"]
        unet.weight = text_encoder.linear.weight  # the host takes it to main memory
        unet(torch.randn(1, SIZE))
        assert waits == ["waited"], "nothing of this model has moved since the host's last move"
        memory.free_memory(5, GPU)
        waits.clear()
        unet(torch.randn(1, SIZE))
        assert waits == ["waited"]


def test_models_that_no_gpu_reads_are_not_pinned(waits: list[str]) -> None:
    moves = PinnedMoves()
    StreamedLayers(moves).pin(forge_memory([], Model(), device=torch.device("cpu")))
    StreamedLayers(moves).pin(forge_memory([], "a model that is gone"))  # type: ignore[arg-type]
    StreamedLayers(moves).pin(ModuleType("memory_management"))
    assert waits == []


def test_which_tensors_are_pinned_where_they_are(waits: list[str]) -> None:
    class Packed(torch.Tensor):
        """As quantized weights are."""

    big, base = torch.randn(256, 256), torch.randn(2, 256, 256)
    tensors = [
        base[0], torch.empty(0), big.to_sparse(), big.to("meta"), big.as_subclass(Packed),
    ]  # fmt: skip
    moves = PinnedMoves()
    assert moves.pin(tensors, GPU) == 0
    assert waits == []
    parameter = nn.Parameter(torch.randn(256, 256).t(), requires_grad=True)
    assert moves.pin([big, nn.Parameter(big)], GPU) == 0  # they stay one
    assert moves.pin([big, parameter], GPU) == 2
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.stride() == (1, 256)


def test_a_step_waits_but_not_while_it_is_recorded(
    waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moves, model = PinnedMoves(), Model()
    streamed = StreamedLayers(moves)
    streamed.pin(forge_memory([], model))
    waits.clear()
    image = torch.randn(1, SIZE)
    expected = model.linear(image)
    model.linear.register_forward_hook(streamed.wait)
    assert torch.equal(model.linear(image), expected)
    assert waits == ["waited"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model.linear(image)
    assert waits == ["waited"]


@pytest.mark.gpu
@pytest.mark.parametrize("inference", [False, True])
def test_streamed_layers_on_a_gpu(inference: bool) -> None:
    moves, model = PinnedMoves(), Model()
    model.conv.to(GPU)
    expected = numbers(model)
    with torch.inference_mode(inference):
        StreamedLayers(moves).pin(forge_memory([], model))
    assert pinned(model) == {"linear.weight", "linear.bias", "tied.weight", "tied.bias"}
    assert places(model) == {"cpu", "cuda"}
    assert_same(model, expected)
    assert not model.linear.weight.is_inference()
    model.to(GPU)
    with moves:
        model.to("cpu")
    assert_same(model, expected)


@pytest.mark.gpu
def test_streamed_layers_are_pinned_a_little_at_each_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "PINNING_LIMIT_S", 1e-9)
    monkeypatch.setattr(pinned_memory, "CHUNK_BYTES", SIZE * SIZE * 4)
    model, moves = nn.Sequential(*(layer() for _ in range(3))), PinnedMoves(PinnedMemory())
    expected = numbers(model)
    for count in (1, 2, 3, 3):
        with moves:
            pass  # the next move of the host
        assert moves.pin(model.parameters(), GPU) == count
        assert len(pinned(model)) == count
    assert_same(model, expected)


# ------------------------------------------------------------------ A1111


# Stands for ``modules.lowvram``: its hooks move a module, or the one that is its parent.
LOWVRAM = """
def hook(parents, seen):
    def send_me_to_gpu(module, _):
        seen.append(parents.get(module, module))
    return send_me_to_gpu
"""


def test_what_a1111_moves_is_found() -> None:
    model: Any = nn.Module()
    model.unet, model.vae, model.text = nn.Linear(2, 2), nn.Linear(2, 2), nn.Module()
    model.text.inner = nn.Linear(2, 2)
    assert moved_models(model) == []
    assert moved_models(None) == []
    seen: list[nn.Module] = []
    exec(LOWVRAM, host := {"__name__": "modules.lowvram"})
    send_me_to_gpu = host["hook"]({model.text.inner: model.text}, seen)
    for module in (model.unet, model.text.inner, model.vae):
        module.register_forward_pre_hook(send_me_to_gpu)
    model.text.register_forward_pre_hook(lambda *_: None)  # somebody else's
    assert set(moved_models(model)) == {model.unet, model.vae, model.text}
    model.lowvram = True
    assert set(moved_models(model)) == {model.unet, model.vae, model.text}
    model.lowvram = False  # as the host says of a model that it does not move
    assert moved_models(model) == []
    bring_to_gpu(model.unet)
    assert seen == [model.unet]
