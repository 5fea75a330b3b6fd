"""Folders of transformer models: loading, drawing at any size, prompts, samplers, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from onediff_ext.core.errors import CheckpointError, OptionError
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
from onediff_ext.hosts.diffusers.drawing.transformer_calls import drawn_size, padded
from onediff_ext.hosts.diffusers.jobs.compose_infotext import compose_infotext
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from onediff_ext.hosts.diffusers.transformer_models import transformer_model_of
from tests.support.transformer_folders import FOLDERS, save_folder
from tests.support.transformer_models import lora_state


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Label → folder, written once."""
    root, made = tmp_path_factory.mktemp("folders"), dict[str, Path]()

    def folder(label: str) -> Path:
        if label not in made:
            made[label] = save_folder(label, root / label)
        return made[label]

    return folder


def settings(**others: Any) -> DrawSettings:
    """Two steps of Euler."""
    given = {"prompt": "a fox", "steps": 2, "scheduler": "Euler", "guidance": 3.0, **others}
    return DrawSettings(**given)


def generator(folder: Path) -> ImageGenerator:
    """Of a loaded folder."""
    return ImageGenerator(load_checkpoint(folder, dtype=torch.float32))


@pytest.mark.parametrize("label", FOLDERS)
def test_draws_as_the_pipeline_itself(label: str, folders: Any) -> None:
    """Text to image equals diffusers' own call, in sizes of 16 and in others."""
    image_generator = generator(folders(label))
    model = image_generator.checkpoint.transformer_model
    assert model is not None
    assert model.label == image_generator.checkpoint.architecture == label
    drawn = image_generator.txt2img(settings(), 72, 136, [5]).images[0]
    assert drawn is not None
    assert drawn.size == (72, 136)

    own = FOLDERS[label]()
    own.set_progress_bar_config(disable=True)
    negative = {"negative_prompt": [""]} if model.takes_negative else {}
    expected = own(
        prompt=["a fox"], width=80, height=144, num_inference_steps=2, output_type="pil",
        max_sequence_length=model.tokens, generator=[torch.Generator().manual_seed(5)],
        **{model.guidance_name: 3.0}, **negative,
    ).images[0].crop((0, 0, 72, 136))  # fmt: skip
    difference = np.abs(np.asarray(drawn, dtype=int) - np.asarray(expected, dtype=int))
    assert difference.max() <= 1


@pytest.mark.parametrize("label", FOLDERS)
def test_image_to_image_keeps_the_size(label: str, folders: Any) -> None:
    """It starts from the picture, and says where diffusers has none."""
    image_generator = generator(folders(label))
    start = Image.new("RGB", (88, 64), (200, 30, 30))
    job = settings(strength=0.5)
    if label in ("flux2-klein", "lumina2"):
        with pytest.raises(OptionError, match="no image to image"):
            image_generator.img2img(job, [start], [0])
        return
    direct = image_generator.img2img(job, [start] * 2, [0, 1]).images
    read = image_generator.img2img(job, image_generator.read([start] * 2)[0:1], [0]).images
    assert [image and image.size for image in direct] == [(88, 64)] * 2
    assert np.abs(np.asarray(direct[0], int) - np.asarray(read[0], int)).max() <= 1


def test_pictures_are_padded_with_their_edges() -> None:
    """Sides become multiples of 16; what was there stays."""
    image = Image.fromarray(np.arange(24 * 40 * 3, dtype=np.uint8).reshape(40, 24, 3))
    result = np.asarray(padded(image))
    assert result.shape == (48, 32, 3)
    assert drawn_size(24, 40) == (32, 48)
    assert (result[:40, :24] == np.asarray(image)).all()
    assert (result[:40, 24:] == np.asarray(image)[:, -1:]).all()
    assert (result[40:] == result[39:40]).all()
    assert padded(image.resize((16, 16))).size == (16, 16)


def test_a_long_prompt_has_more_room(folders: Any) -> None:
    """SD3's T5 takes 256 tokens, and up to 512 where the prompt needs them."""
    image_generator = generator(folders("sd3"))
    short, long = settings(), settings(prompt="a fox " * 60)
    given = image_generator._texts(short, ["a fox"]), image_generator._texts(long, [long.prompt])
    assert [arguments["max_sequence_length"] for arguments in given] == [256, 512]
    assert image_generator.ignored_text(long) == []
    too_long = settings(prompt="a fox " * 200)
    assert "is ignored" in image_generator.ignored_text(too_long)[0]


def test_flux_has_its_guidance_as_an_input(folders: Any) -> None:
    """A negative prompt is ignored and said so; the infotext has Forge's names."""
    image_generator = generator(folders("flux"))
    job = settings(negative_prompt="blurry")
    assert "no negative prompt" in image_generator.ignored_text(job)[0]
    text = compose_infotext(image_generator, job, 7, (72, 136), {})
    assert "CFG scale: 1, Distilled CFG Scale: 3.0" in text


def test_samplers_are_those_of_flows(folders: Any) -> None:
    """The model's shift stays; other samplers are refused with the names of these."""
    image_generator = generator(folders("sd3"))
    made = image_generator._scheduler(settings(scheduler="Euler Karras"))
    assert made.config.use_karras_sigmas
    assert made.config.shift == 3.0
    image_generator.check(settings(scheduler="LCM"))
    with pytest.raises(OptionError, match="not for flow-matching") as caught:
        image_generator.check(settings(scheduler="DPM++ 2M"))
    assert "Euler, LCM" in str(caught.value.hint)


def test_defaults_are_known_before_loading(folders: Any, tmp_path: Path) -> None:
    """They come from the model's index; other checkpoints have none."""
    flux, z_image = (transformer_model_of(folders(label)) for label in ("flux", "z-image"))
    assert flux is not None
    assert (flux.steps, flux.guidance) == (28, 3.5)
    assert z_image is not None
    assert (z_image.steps, z_image.guidance) == (9, 0.0)
    assert transformer_model_of(tmp_path) is None
    (tmp_path / "model_index.json").write_text('{"_class_name": ["damaged"]}')
    assert transformer_model_of(tmp_path) is None


def test_other_pipelines_and_classes_are_refused(folders: Any, tmp_path: Path) -> None:
    """A folder may not name a class that might run code."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(CheckpointError, match="cannot be drawn with"):
        load_checkpoint(tmp_path)
    index = '{"_class_name": "FluxPipeline", "transformer": ["evil", "FluxTransformer2DModel"]}'
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(CheckpointError, match="no known class"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"_class_name": null}', '{"_class_name": ["damaged"]}'])
def test_an_index_without_a_pipeline_is_called_so(index: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(CheckpointError, match="names no pipeline"):
        load_checkpoint(tmp_path)


def test_a_lora_file_changes_the_picture(folders: Any, tmp_path: Path) -> None:
    """Loaded by the same option as those of UNets, at a strength."""
    image_generator = generator(folders("flux"))
    before = np.asarray(image_generator.txt2img(settings(), 64, 64, [0]).images[0], dtype=int)
    state = lora_state(image_generator.pipe.transformer, ("attn.to_q", "ff.net.2"))
    save_file(state, tmp_path / "style.safetensors")
    name = load_lora(image_generator.pipe, tmp_path / "style.safetensors", 0.8)
    after = np.asarray(image_generator.txt2img(settings(), 64, 64, [0]).images[0], dtype=int)
    assert name == "style"
    assert np.abs(after - before).max() > 1
    load_lora(image_generator.pipe, tmp_path / "style.safetensors", 0.5)
    assert len(image_generator.pipe.get_active_adapters()) == 2
