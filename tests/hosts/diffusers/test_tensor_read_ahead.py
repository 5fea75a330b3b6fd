"""Weights that a thread reads while libraries are imported: the same model, or no speed-up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.checkpoints.tensor_read_ahead import TensorReadAhead
from tests.support import models

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_ldm(models.sd15(), path)
    tensors = load_file(path)
    key = next(key for key in tensors if key.startswith("model.diffusion_model."))
    save_file({**tensors, "model_ema.decay": tensors[key].clone()}, path)
    return path


def weights_of(path: Path, reading: TensorReadAhead | None) -> dict[str, torch.Tensor]:
    loaded = load_checkpoint(path, dtype=torch.float32, device=CPU, read_ahead=reading)
    parts = ("unet", "vae", "text_encoder")
    return {
        f"{part}.{key}": tensor
        for part in parts
        for key, tensor in loaded.components[part].state_dict().items()
    }


def is_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_model_is_the_same_and_no_tensor_is_read_twice(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights_of(checkpoint, None)
    reading = TensorReadAhead(checkpoint, torch.float32, CPU)
    taken: list[str] = []
    take = reading.take

    def noting(path: Path, key: str, dtype: torch.dtype | None, device: object) -> object:
        tensor = take(path, key, dtype, device)
        if tensor is not None:
            taken.append(key)
        return tensor

    monkeypatch.setattr(reading, "take", noting)
    assert is_same(weights_of(checkpoint, reading), expected)
    needed = [key for key in load_file(checkpoint) if not key.startswith("model_ema.")]
    assert sorted(taken) == sorted(needed)


def test_weights_that_no_model_needs_are_not_read(checkpoint: Path) -> None:
    reading = TensorReadAhead(checkpoint, None, CPU)
    assert reading.take(checkpoint, "model_ema.decay", None, CPU) is None
    reading.close()


def test_another_dtype_is_read_by_who_asks(checkpoint: Path) -> None:
    reading = TensorReadAhead(checkpoint, torch.float16, CPU)
    assert is_same(weights_of(checkpoint, reading), weights_of(checkpoint, None))


def test_a_file_that_was_replaced_is_read_again(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint.read_bytes())
    reading = TensorReadAhead(path, torch.float32, CPU)
    other = tmp_path / "other.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(checkpoint).items()}, other)
    other.replace(path)
    found = weights_of(path, reading)
    assert is_same(found, weights_of(path, None))
    assert not is_same(found, weights_of(checkpoint, None))


def test_an_error_is_met_by_who_loads_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"no model")
    for missing in (path, tmp_path / "none.safetensors"):
        reading = TensorReadAhead(missing, torch.float32, CPU)
        assert reading.take(missing, "any", torch.float32, CPU) is None
        with pytest.raises(CheckpointError):
            load_checkpoint(missing, device=CPU, read_ahead=reading)


def test_memory_that_runs_out_ahead_leaves_nothing_behind(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights_of(checkpoint, None)

    def no_memory(self: TensorReadAhead) -> None:
        self._read["some"] = torch.zeros(1)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(TensorReadAhead, "_read_all", no_memory)
    reading = TensorReadAhead(checkpoint, torch.float32, CPU)
    reading._thread.join()
    assert not reading._read
    assert is_same(weights_of(checkpoint, reading), expected)
