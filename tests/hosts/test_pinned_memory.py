"""Pinned memory: which chunk a tensor gets, and when chunks go back to the system."""

from __future__ import annotations

import copy
import gc
import io
from itertools import pairwise

import pytest
import torch

from onediff_ext.hosts import pinned_memory
from onediff_ext.hosts.pinned_memory import (
    ALIGNMENT,
    CHUNK_BYTES,
    SPARE_BYTES,
    PinnedMemory,
)

GPU = torch.device("cuda", 0)
CHUNK = 2**16


class Driver:
    """Notes what is pinned and unpinned, and waits for the GPU."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # bytes by address
        self.waits = 0
        self.error = ""

    def call(
        self, device: torch.device, name: str, address: int, size_bytes: int = 0, flags: int = 0
    ) -> None:
        assert device == GPU
        if self.error:
            raise RuntimeError(self.error)
        if name == "cudaHostRegister":
            assert address not in self.pinned
            assert size_bytes > 0
            self.pinned[address] = size_bytes
        else:
            assert name == "cudaHostUnregister"
            assert self.waits
            del self.pinned[address]

    def wait(self, device: torch.device) -> None:
        assert device == GPU
        self.waits += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pinned_memory, "_call_cuda", made.call)
    monkeypatch.setattr(pinned_memory, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.fixture
def memory(driver: Driver) -> PinnedMemory:
    return PinnedMemory(lambda: 2**40)


def made(memory: PinnedMemory, tensor: torch.Tensor) -> torch.Tensor:
    copied = memory.copy(tensor, GPU)
    assert copied is not None
    return copied


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(5, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 8)[::2, 1:3],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(7).half(),
        torch.randn(7).bfloat16(),
        torch.randn(7).to(torch.float8_e4m3fn),
        torch.tensor(True),
        torch.randint(9, (4,)),
        torch.randn(3, dtype=torch.complex64),
    ],
)
def test_a_copy_is_a_tensor_like_any_other(memory: PinnedMemory, tensor: torch.Tensor) -> None:
    copied, plain = made(memory, tensor), torch.empty_like(tensor).copy_(tensor)
    assert type(copied) is torch.Tensor
    assert copied.dtype == tensor.dtype
    assert torch.equal(copied.to(torch.complex64), tensor.to(torch.complex64))
    assert copied.stride() == plain.stride()
    assert not copied._is_view()
    assert copied.storage_offset() == 0
    assert copied.untyped_storage().nbytes() == copied.nbytes
    assert copied.data_ptr() % ALIGNMENT == 0
    assert copy.deepcopy(copied).stride() == copied.stride()
    torch.save(copied, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file).stride() == copied.stride()


def test_tensors_do_not_overlap(memory: PinnedMemory, driver: Driver) -> None:
    sizes = [1, 63, 64, 65, 1000, 5000, 20000, CHUNK, CHUNK + 1, 30, 3 * CHUNK]
    tensors = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    copies = [made(memory, tensor) for tensor in tensors]
    assert all(torch.equal(*pair) for pair in zip(copies, tensors, strict=True))
    places = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in copies)
    assert all(one[1] <= other[0] for one, other in pairwise(places))
    for start, end in places:
        assert any(at <= start and end <= at + size for at, size in driver.pinned.items())


def test_chunks_are_used_again_within_a_move(memory: PinnedMemory, driver: Driver) -> None:
    weights = [torch.randn(CHUNK // 32) for _ in range(24)]  # three chunks
    weights += [torch.randn(CHUNK // 4), torch.randn(CHUNK)]  # and one for each of these
    copies = [made(memory, weight) for weight in weights]
    first = dict(driver.pinned)
    assert sorted(first.values()) == [CHUNK] * 4 + [4 * CHUNK]
    memory.begin_move()
    for _ in range(3):
        del copies[:]  # to the GPU
        copies = [made(memory, weight) for weight in reversed(weights)]
    memory.end_move()
    assert driver.pinned == first
    assert all(torch.equal(*pair) for pair in zip(copies, reversed(weights), strict=True))


def test_a_chunk_with_one_tensor_left_is_left_alone(memory: PinnedMemory, driver: Driver) -> None:
    memory.begin_move()
    copies = [made(memory, torch.full((CHUNK // 32,), float(number))) for number in range(24)]
    kept = copies[9][:1]  # in the second of three; a view keeps its memory
    del copies
    more = [made(memory, torch.zeros(CHUNK // 32)) for _ in range(24)]
    assert kept.item() == 9
    assert len(driver.pinned) == 4
    assert len(more) == 24


@pytest.mark.parametrize("part", [16, 8, 7, 5, 3, 2, 1, 0.6])
def test_hardly_more_is_pinned_than_is_needed(
    memory: PinnedMemory, driver: Driver, part: float
) -> None:
    weights = [torch.empty(int(CHUNK / part), dtype=torch.uint8) for _ in range(40)]
    copies = [made(memory, weight) for weight in weights]
    needed_bytes = sum(each.nbytes for each in copies)
    assert sum(driver.pinned.values()) <= 1.15 * needed_bytes + CHUNK


@pytest.mark.parametrize(("size", "waits"), [(CHUNK // 32, 1), (CHUNK // 4, 9)])
def test_a_chunk_is_used_again_when_no_gpu_reads_it(
    memory: PinnedMemory, driver: Driver, size: int, waits: int
) -> None:
    """Another thread, or a function that nobody notes, may have launched it."""
    memory.begin_move()
    del (copied := [made(memory, torch.ones(size)) for _ in range(9)])[:]
    chunks, driver.waits = len(driver.pinned), 0
    copied += [made(memory, torch.ones(size)) for _ in range(9)]
    assert (driver.waits, len(driver.pinned)) == (waits, chunks)


def test_a_wait_that_would_end_a_recording(
    memory: PinnedMemory, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError(f"{device} is being recorded by another thread")

    memory.begin_move()
    made(memory, torch.ones(CHUNK // 4))
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    copied = made(memory, torch.ones(CHUNK // 4))
    assert len(driver.pinned) == 2  # a chunk that nobody has used
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    del copied
    made(memory, torch.ones(CHUNK // 4))
    assert len(driver.pinned) == 3


def test_each_gpu_is_waited_for_that_uses_a_chunk(
    memory: PinnedMemory, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.device] = []
    driver.waits = 1
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    other = torch.device("cuda", 1)
    copies = [memory.copy(torch.ones(4), device) for device in (GPU, other, GPU)]
    assert None not in copies
    del copies
    assert sorted(device.index for device in waited) == [0, 1]
    assert driver.pinned == {}


def test_chunks_of_other_sizes_go_before_it_is_turned_off(driver: Driver) -> None:
    available = SPARE_BYTES + 4 * CHUNK
    memory = PinnedMemory(lambda: available - sum(driver.pinned.values()))
    memory.begin_move()
    del (copied := [made(memory, torch.ones(CHUNK // 4)) for _ in range(4)])[:]
    assert copied == []
    assert len(driver.pinned) == 4
    assert made(memory, torch.ones(CHUNK // 2)).sum() == CHUNK // 2  # twice as large
    assert list(driver.pinned.values()) == [2 * CHUNK]


def test_all_empty_chunks_are_given_back(memory: PinnedMemory, driver: Driver) -> None:
    memory.begin_move()
    kept = made(memory, torch.ones(4))
    made(memory, torch.ones(CHUNK))
    memory.end_move()
    memory.give_back()
    assert len(driver.pinned) == 1
    del kept
    assert driver.pinned == {}


def test_a_deleted_model_gives_its_chunks_back(memory: PinnedMemory, driver: Driver) -> None:
    model = [made(memory, torch.randn(CHUNK // 40)) for _ in range(25)]
    model.append(made(memory, torch.randn(CHUNK // 2)))
    other = made(memory, torch.randn(4))  # in the third chunk
    assert len(driver.pinned) == 4
    del model
    assert len(driver.pinned) == 1
    assert made(memory, torch.randn(4)).sum() != other.sum()
    del other
    assert driver.pinned == {}
    assert made(memory, torch.ones(4)).sum() == 4


def test_nothing_is_given_back_while_something_is_recorded(
    memory: PinnedMemory, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA would end the recording with an error."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made(memory, torch.ones(4))
    assert driver.waits == 0
    assert len(driver.pinned) == 1
    memory.begin_move()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made(memory, torch.ones(4))
    memory.end_move()
    assert len(driver.pinned) == 1  # the same one


def test_garbage_may_be_collected_in_any_function(memory: PinnedMemory, driver: Driver) -> None:
    """Its tensors die with the lock held, in the same thread."""
    cycle: list[object] = [made(memory, torch.ones(CHUNK // 40))]
    cycle.append(cycle)
    with memory._alone():
        del cycle
        gc.collect()
        assert memory.copy(torch.ones(4), GPU) is None  # it may move a model, too
        memory.begin_move()
        memory.end_move()
        memory.settle()
    assert len(driver.pinned) == 1
    assert made(memory, torch.full((CHUNK // 40,), 2.0)).sum() == CHUNK // 40 * 2
    assert driver.pinned == {}


def test_pinning_takes_no_longer_than_its_limit(
    memory: PinnedMemory, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_memory, "PINNING_LIMIT_S", 1e-9)
    weights = [torch.randn(CHUNK // 4) for _ in range(3)]
    kept = []
    for count in (1, 2, 3, 3):
        memory.begin_move()
        kept = [memory.copy(weight, GPU) for weight in weights]
        memory.end_move()
        assert sum(each is not None for each in kept) == count
        memory.begin_move()
        del kept
        memory.end_move()
    assert len(driver.pinned) == 3


def test_without_enough_main_memory(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    available = SPARE_BYTES + 3 * CHUNK - 1
    memory = PinnedMemory(lambda: available - sum(driver.pinned.values()))
    weights = [torch.randn(CHUNK // 4) for _ in range(4)]
    memory.begin_move()
    copies = [memory.copy(weight, GPU) for weight in weights]
    memory.end_move()
    assert [each is not None for each in copies] == [True, True, False, False]
    assert "main memory is short" in caplog.text
    available = 2**40
    assert memory.copy(weights[0], GPU) is None  # from now on
    memory.begin_move()
    del copies[0]
    assert len(driver.pinned) == 2
    memory.end_move()
    assert len(driver.pinned) == 1
    del copies
    assert driver.pinned == {}


def test_main_memory_that_others_take_meanwhile(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    available = 2**40
    memory = PinnedMemory(lambda: available)
    memory.begin_move()
    made(memory, torch.ones(4))
    memory.end_move()
    assert len(driver.pinned) == 1
    available = SPARE_BYTES // 2 - 1
    memory.begin_move()
    assert driver.pinned == {}
    assert "main memory is short" in caplog.text
    memory.end_move()


@pytest.mark.parametrize("empty_bytes", [0, CHUNK])
@pytest.mark.parametrize("short_of", [0, 1])
def test_between_pictures_the_host_finds_what_it_would_find_without(
    driver: Driver, empty_bytes: int, short_of: int
) -> None:
    """It may copy a model out by itself, to read another one then."""
    available = 2**40
    memory = PinnedMemory(lambda: available)
    memory.begin_move()
    kept = made(memory, torch.ones(4))
    if empty_bytes:
        made(memory, torch.ones(CHUNK // 4))
    memory.end_move()
    available = SPARE_BYTES + 2 * CHUNK - short_of
    memory.settle()
    assert len(driver.pinned) == (2 if empty_bytes and not short_of else 1)
    is_off = memory.copy(torch.ones(4), GPU) is None
    assert is_off == bool(empty_bytes and short_of)
    assert kept.sum() == 4


def test_a_driver_that_refuses(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.error = "CUDA error: not supported\nmore of it"
    memory = PinnedMemory(lambda: 2**40)
    assert memory.copy(torch.ones(4), GPU) is None
    assert caplog.messages == [
        "Models are moved without pinned memory from now on: CUDA error: not supported"
    ]
    driver.error = ""
    assert memory.copy(torch.ones(4), GPU) is None


def test_a_driver_that_keeps_it(
    memory: PinnedMemory, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an error of the GPU. Ordinary memory must not lie where it is still pinned."""
    copied = made(memory, torch.ones(4))
    driver.error = "CUDA error: an illegal memory access was encountered"
    del copied
    assert len(driver.pinned) == len(memory._chunks) == 1
    assert "illegal memory access" in caplog.text


@pytest.mark.gpu
def test_a_gpu_uses_it() -> None:
    memory = PinnedMemory()
    weight = torch.randn(CHUNK_BYTES // 8, device=GPU)
    copied = memory.copy(weight, GPU, non_blocking=True)
    assert copied is not None
    torch.cuda.synchronize()
    assert copied.is_pinned()
    assert torch.equal(copied, weight.cpu())
    assert torch.equal(copied.to(GPU, non_blocking=True), weight)
    assert copied[5:].is_pinned()
    del copied
    assert memory._chunks == []
    again = memory.copy(weight, GPU)  # the same addresses may be pinned once more
    assert again is not None
    assert again.is_pinned()


@pytest.mark.gpu
def test_a_gpu_that_is_busy_reads_the_numbers_that_were_there() -> None:
    """Nobody notes this read, and the chunk is filled again at once."""
    memory, busy = PinnedMemory(), torch.randn(8192, 8192, device=GPU)
    memory.begin_move()
    weight = memory.copy(torch.full((CHUNK_BYTES // 2,), 3, dtype=torch.uint8), GPU)
    assert weight is not None
    moved = torch.empty_like(weight, device=GPU)
    for _ in range(8):
        busy = busy @ busy
    moved.copy_(weight, non_blocking=True)
    address = weight.data_ptr()
    del weight
    again = memory.copy(torch.full((CHUNK_BYTES // 2,), 7, dtype=torch.uint8), GPU)
    assert again is not None
    assert again.data_ptr() == address
    assert bool((moved == 3).all())
    assert bool((again == 7).all())
    memory.end_move()


@pytest.mark.gpu
def test_a_refusal_of_the_driver_leaves_no_error_behind() -> None:
    """torch would raise it behind the next launch, in the middle of a picture."""
    tensor = torch.empty(2**20, dtype=torch.uint8)
    call = pinned_memory._call_cuda
    call(GPU, "cudaHostRegister", tensor.data_ptr(), tensor.nbytes, 0)
    with pytest.raises(RuntimeError, match="already"):
        call(GPU, "cudaHostRegister", tensor.data_ptr(), tensor.nbytes, 0)
    assert torch.ones(4, device=GPU).add_(1).sum() == 8
    call(GPU, "cudaHostUnregister", tensor.data_ptr())
