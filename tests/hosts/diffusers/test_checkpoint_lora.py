"""LoRA files in both layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from tests.support import adapter_weights, models


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.no_grad()
def answer(pipe: Any) -> torch.Tensor:
    """The UNet's output for a prompt that went through the text encoders."""
    tokens = pipe.tokenizer("a cat", padding="max_length", return_tensors="pt").input_ids
    states = [pipe.text_encoder(tokens, output_hidden_states=True).hidden_states[-2]]
    if getattr(pipe, "text_encoder_2", None) is not None:
        states.append(pipe.text_encoder_2(tokens, output_hidden_states=True).hidden_states[-2])
    inputs = models.unet_inputs(pipe.unet, batch=1)
    inputs["encoder_hidden_states"] = torch.cat(states, dim=-1)
    return pipe.unet(**inputs).sample


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl"])
def test_both_layouts_are_the_same_lora(name: str, tmp_path: Path) -> None:
    answers = []
    plain = answer(models.BUILDERS[name]())
    for layout in ("diffusers", "kohya"):
        pipe = models.BUILDERS[name]()
        path = adapter_weights.save_lora(pipe, tmp_path / f"{layout}.safetensors", layout)
        load_lora(pipe, path)
        answers.append(answer(pipe))
    assert (answers[0] - plain).abs().mean() > 0.02
    assert torch.allclose(*answers, atol=1e-5)


def test_text_encoder_and_alpha_count(tmp_path: Path) -> None:
    answers = []
    for text, alpha in ((True, 4.0), (False, 4.0), (True, 2.0)):
        pipe = models.sd15()
        path = adapter_weights.save_lora(
            pipe, tmp_path / "a.safetensors", "kohya", text=text, alpha=alpha
        )
        load_lora(pipe, path)
        answers.append(answer(pipe))
    assert (answers[0] - answers[1]).abs().mean() > 0.01
    assert (answers[0] - answers[2]).abs().mean() > 0.01


def test_weight_and_several(tmp_path: Path) -> None:
    pipe = models.sd15()
    plain = answer(pipe)
    first = load_lora(pipe, adapter_weights.save_lora(pipe, tmp_path / "v1.5 cat.safetensors"), 0.0)
    assert first == "v1_5_cat"
    assert torch.allclose(answer(pipe), plain, atol=1e-5)
    pipe.set_adapters([first], [0.7])
    alone = answer(pipe)
    other = adapter_weights.lora_tensors(models.sd15(), seed=1)
    save_file(other, str(tmp_path / "dog.safetensors"))
    second = load_lora(pipe, tmp_path / "dog.safetensors", 0.0)
    # The first keeps its weight.
    assert torch.allclose(answer(pipe), alone, atol=1e-5)
    assert load_lora(pipe, tmp_path / "dog.safetensors", 0.5) == "dog_2"
    assert (answer(pipe) - alone).abs().mean() > 0.01
    pipe.delete_adapters([first, second, "dog_2"])
    assert torch.allclose(answer(pipe), plain, atol=1e-5)


def refuse(pipe: Any, path: Path, message: str, hint: str) -> None:
    before = answer(pipe)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_lora(pipe, path)
    assert hint in caught.value.hint
    assert torch.equal(answer(pipe), before)


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_other_architecture(layout: str, tmp_path: Path) -> None:
    path = adapter_weights.save_lora(models.sdxl(), tmp_path / "xl.safetensors", layout)
    refuse(models.sd15(), path, r"wide.*\(sd1\) has 64", "this kind of checkpoint")
    path = adapter_weights.save_lora(models.sd15(), tmp_path / "sd.safetensors", layout)
    refuse(models.sdxl(), path, r"wide.*\(sdxl\) has \d", "this kind of checkpoint")


def test_text_encoder_of_another_architecture(tmp_path: Path) -> None:
    tensors = adapter_weights.lora_tensors(models.sdxl(), "kohya")
    path = tmp_path / "text.safetensors"
    save_file({key: one for key, one in tensors.items() if "_te2_" in key}, str(path))
    refuse(models.sd15(), path, "another text encoder, 128 wide", "this kind of checkpoint")


def test_other_widths(tmp_path: Path) -> None:
    wide = models.sd15(widths=(64, 128, 128))
    path = adapter_weights.save_lora(wide, tmp_path / "wide.safetensors", "kohya", text=False)
    refuse(models.sd15(), path, "cannot be loaded|does not fit", "")


def test_unknown_layers(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"lora_unet_nowhere.lora_down.weight": torch.zeros(4, 4)}, str(path))
    refuse(models.sd15(), path, "cannot be loaded", "layout")


def test_files_that_are_no_lora(tmp_path: Path) -> None:
    pipe = models.sd15()
    (tmp_path / "lora.pt").write_bytes(b"x")
    refuse(pipe, tmp_path / "lora.pt", "runs whatever code", "safetensors")
    refuse(pipe, tmp_path / "none.safetensors", "no file", "path")
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    refuse(pipe, path, "is a checkpoint, not a LoRA", "Choose a LoRA")


def test_weights_of_one_dimension_are_refused(tmp_path: Path) -> None:
    pipe = models.sd15()
    path = adapter_weights.save_lora(pipe, tmp_path / "lora.safetensors", "kohya")
    for shape in ((), (3,), (0,), (1, 1, 1)):
        weights = {key: torch.zeros(shape) for key in load_file(path)}
        save_file(weights, str(path))
        with pytest.raises(CheckpointError):
            load_lora(pipe, path)
    assert pipe.get_list_adapters() == {}


@pytest.mark.parametrize("name", ["forward", "keys", "training", "weight", "x" * 200, "\x1b[2J"])
def test_a_name_that_modules_have_themselves(name: str, tmp_path: Path) -> None:
    pipe = models.sd15()
    path = adapter_weights.save_lora(pipe, tmp_path / f"{name}.safetensors", "diffusers")
    adapter = load_lora(pipe, path)
    assert adapter in pipe.get_active_adapters()
    assert adapter.isidentifier()
