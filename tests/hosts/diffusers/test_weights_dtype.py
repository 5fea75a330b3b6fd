"""The dtype of a checkpoint's weights by the user's name for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onediff_ext.hosts.diffusers.checkpoints.weights_dtype import weights_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(params=["unet", "transformer", "index", "single file with a config"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path | None, bool]:
    """A checkpoint, its config folder, and whether it is a transformer."""
    folder = tmp_path / "model"
    (folder / ("unet" if request.param == "unet" else "transformer")).mkdir(parents=True)
    if request.param == "index":
        return folder / "model_index.json", None, True
    if request.param == "single file with a config":
        return tmp_path / "weights.safetensors", folder, True
    return folder, None, request.param == "transformer"


def gpu_of(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    def get(device: torch.device) -> tuple[int, int]:
        assert device == GPU
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", get)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_transformers_are_bf16_on_a_gpu(
    model: tuple[Path, Path | None, bool],
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu_of(monkeypatch, capability)
    path, config, is_transformer = model
    expected = torch.bfloat16 if is_transformer else torch.float16
    assert weights_dtype("auto", GPU, path, config) == expected


def test_a_gpu_without_bf16_takes_fp16(
    model: tuple[Path, Path | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_of(monkeypatch, (7, 5))
    path, config, _ = model
    assert weights_dtype("auto", GPU, path, config) == torch.float16


def test_a_cpu_and_the_users_own_choice(model: tuple[Path, Path | None, bool]) -> None:
    path, config, _ = model
    assert weights_dtype("auto", CPU, path, config) == torch.float32
    for device in (CPU, GPU):
        assert weights_dtype("fp32", device, path, config) == torch.float32
        assert weights_dtype("fp16", device, path, config) == torch.float16
        assert weights_dtype("bf16", device, path, config) == torch.bfloat16


def test_a_single_file_of_a_unet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_of(monkeypatch, (9, 0))
    assert weights_dtype("auto", GPU, tmp_path / "model.safetensors") == torch.float16
