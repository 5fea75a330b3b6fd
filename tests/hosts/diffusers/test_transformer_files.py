"""Single files with the weights of a transformer, beside the diffusers folder of their model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints import transformer_file
from onediff_ext.hosts.diffusers.checkpoints.load import LoadedCheckpoint, load_checkpoint
from onediff_ext.hosts.diffusers.checkpoints.tensor_file import TensorFile
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
from tests.support import transformer_models as models
from tests.support.transformer_files import diffusers_file, sd3_file, z_image_file
from tests.support.transformer_folders import save_folder

FILES = {
    "sd3": (models.sd3, sd3_file),
    "z-image": (models.z_image, z_image_file),
    "flux": (models.flux, diffusers_file),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Label → folder, written once. Its own transformer has no weights."""
    root, made = tmp_path_factory.mktemp("folders"), dict[str, Path]()

    def folder(label: str) -> Path:
        if label not in made:
            made[label] = save_folder(label, root / label)
            for weights in (made[label] / "transformer").glob("*.safetensors"):
                weights.unlink()
        return made[label]

    return folder


def pixels(checkpoint: LoadedCheckpoint) -> np.ndarray:
    """Two steps."""
    settings = DrawSettings("a fox", steps=2, scheduler="Euler", guidance=3.0)
    (image,) = ImageGenerator(checkpoint).txt2img(settings, 72, 64, [5]).images
    assert image is not None
    return np.asarray(image, dtype=int)


@pytest.mark.parametrize("label", FILES)
def test_draws_as_the_folder_of_these_weights(
    label: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    make, layout = FILES[label]
    transformer = make(seed=4).transformer
    file, whole = tmp_path / "fine-tuned.safetensors", tmp_path / "whole"
    save_file(layout(transformer), file)
    shutil.copytree(folders(label), whole)
    transformer.save_pretrained(whole / "transformer")
    loaded = load_checkpoint(file, config=folders(label))
    assert (loaded.architecture, loaded.name) == (label, "fine-tuned")
    assert (pixels(loaded) == pixels(load_checkpoint(whole))).all()


def flux_weights(**config: Any) -> dict[str, torch.Tensor]:
    return diffusers_file(models.flux_transformer(**config))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(2)}, "with a UNet"),
        ({"double_blocks.0.img_attn.qkv.scale_weight": torch.zeros(2)}, "holds quantized weights"),
        ({"joint_blocks.0.x_block.mlp.fc1.weight": torch.zeros(2)}, "cannot be loaded as the Flux"),
        (flux_weights(guidance_embeds=False), "cannot be loaded as the Flux"),
    ],
)
def test_other_files_are_refused(
    weights: Any, message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(file, config=folders("flux"))
    assert caught.value.hint


def test_a_file_of_a_similar_model_is_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """diffusers would load what fits: Flux.1-dev would lose its guidance in schnell's folder."""
    weights = z_image_file(models.z_image().transformer)
    del weights["layers.1.feed_forward.w2.weight"]
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    with pytest.raises(CheckpointError, match="the file lacks weights"):
        load_checkpoint(path, config=folders("z-image"))
    schnell, keys = models.flux_transformer(guidance_embeds=False), ["guidance_in.in_layer.weight"]
    with pytest.raises(CheckpointError, match="takes a guidance"):
        transformer_file._check(schnell, TensorFile(path, {}), keys, tmp_path)


def test_pickles_folders_and_files_alone_are_refused(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    pickle, file = tmp_path / "model.ckpt", tmp_path / "model.safetensors"
    pickle.write_bytes(b"\x80\x02")
    with pytest.raises(CheckpointError, match="is a pickle"):
        load_checkpoint(pickle, config=folders("flux"))
    with pytest.raises(CheckpointError, match="single file of a transformer only"):
        load_checkpoint(folders("flux"), config=folders("flux"))
    save_file({"double_blocks.0.img_attn.qkv.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match="a Flux model") as caught:
        load_checkpoint(file)
    assert "--config FOLDER" in str(caught.value.hint)
