"""The estimate of what a VAE needs, against activations counted operator by operator."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onediff_ext.hosts.diffusers.checkpoints.architectures import read_architecture
from onediff_ext.hosts.diffusers.vae import vae_memory
from onediff_ext.hosts.diffusers.vae.vae_memory import DeviceMemory, needed_bytes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self._now = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given:
                storage = leaf.untyped_storage()
                key = storage._cdata
                if not self._tensors.get(key):
                    self._bytes[key] = storage.nbytes()
                    self._now += storage.nbytes()
                self._tensors[key] = self._tensors.get(key, 0) + 1
                weakref.finalize(leaf, self._gone, key)
        self.peak = max(self.peak, self._now)
        return output

    def _gone(self, key: int) -> None:
        self._tensors[key] -= 1
        if not self._tensors[key]:
            self._now -= self._bytes[key]


def full_size(architecture: str, device: str, dtype: torch.dtype) -> Any:
    """An AutoencoderKL of full width; its weights do not matter."""
    with torch.device(device):
        vae = AutoencoderKL.from_config(dict(read_architecture(architecture).vae))
    return vae.to(dtype).eval().requires_grad_(False)


def run(vae: Any, part: str, pictures: int, side_px: int, dtype: torch.dtype, device: str) -> Any:
    shape = (pictures, 3, side_px, side_px)
    if part == "decoder":
        shape = (pictures, 4, side_px // 8, side_px // 8)
    given = torch.zeros(shape, dtype=dtype, device=device)
    with torch.no_grad():
        return (vae.decode if part == "decoder" else vae.encode)(given)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("architecture", ["sd1", "sdxl"])
def test_the_estimate_is_what_operators_make(
    architecture: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae_memory, "_BESIDES", 1.0)
    vae = full_size(architecture, "meta", torch.float16)
    channels = vae.config.block_out_channels
    for pictures, dtype in ((1, torch.float16), (2, torch.float16), (1, torch.float32)):
        with LiveBytes() as live:
            run(vae.to(dtype), part, pictures, 512, dtype, "meta")
        needed = needed_bytes(part, channels, pictures, 512 * 512, dtype)
        assert needed == pytest.approx(live.peak, rel=0.01)


def test_a_device_that_does_not_tell() -> None:
    memory = DeviceMemory(SimpleNamespace())
    assert memory.free_bytes(torch.device("cpu")) is None
    assert memory.bytes_of_captures() == 0


@pytest.mark.gpu
def test_what_is_free_on_a_gpu() -> None:
    device, memory = torch.device("cuda"), DeviceMemory(SimpleNamespace())
    torch.cuda.empty_cache()
    before = memory.free_bytes(device)
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    during = memory.free_bytes(device)
    del held  # torch keeps it reserved, for whoever asks next
    after = memory.free_bytes(device)
    assert before is not None
    assert during is not None
    assert after is not None
    assert before - during == pytest.approx(2**30, rel=0.1)
    assert after == pytest.approx(before, abs=2**27)


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_estimate_is_what_a_gpu_takes(part: str, dtype: torch.dtype) -> None:
    vae = full_size("sdxl", "cuda", dtype).to(memory_format=torch.channels_last)
    for side_px in (512, 1024):
        run(vae, part, 1, side_px, dtype, "cuda")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(vae, part, 1, side_px, dtype, "cuda")
        taken = torch.cuda.max_memory_allocated() - before
        needed = needed_bytes(part, vae.config.block_out_channels, 1, side_px**2, dtype)
        print(f"{part} {dtype} {side_px}: {taken / 1e9:.2f} GB taken, {needed / 1e9:.2f} estimated")
        assert 0.5 * needed < taken < 1.2 * needed
