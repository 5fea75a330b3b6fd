"""Each architecture: build, save in the original layout, load: the same tensors and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from onediff_ext.core.errors import CheckpointError
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.hosts.diffusers.checkpoints.load import LoadedCheckpoint, load_checkpoint
from tests.support import models

LABELS = {
    "sd15": "sd1",
    "sd15_inpaint": "sd1",
    "lcm": "sd1",
    "sd2": "sd2",
    "sd2_inpaint": "sd2",
    "sdxl": "sdxl",
    "sdxl_inpaint": "sdxl",
    "sdxl_refiner": "sdxl-refiner",
}
MODELS = ("unet", "vae", "text_encoder", "text_encoder_2")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, and one thread: for models this small two threads only wait for each other."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_same_weights(expected: Any, loaded: Any) -> None:
    for name in MODELS:
        first, second = getattr(expected, name, None), getattr(loaded, name, None)
        assert (first is None) == (second is None), name
        if first is None:
            continue
        a, b = first.state_dict(), second.state_dict()
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


def run(pipe: Any, steps: int = 2) -> Any:
    """One small picture from any of the pipelines."""
    options: dict[str, Any] = {"width": 64, "height": 64}
    grey = Image.new("RGB", (64, 64), "grey")
    if "Img2Img" in type(pipe).__name__:
        options = {"image": grey, "strength": 1.0}
    if "Inpaint" in type(pipe).__name__:
        options |= {"image": grey, "mask_image": Image.new("L", (64, 64), 255), "strength": 1.0}
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe(
        "a cat", num_inference_steps=steps, generator=generator, output_type="np", **options
    ).images[0]


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    """On some processors two models of the very same weights differ in the last digits."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def assert_same_outputs(expected: Any, loaded: Any) -> None:
    inputs = models.unet_inputs(expected.unet, height_latent=9, width_latent=12)
    assert_close(expected.unet(**inputs).sample, loaded.unet(**inputs).sample)
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    assert_close(expected.vae.decode(latent).sample, loaded.vae.decode(latent).sample)
    picture = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    first, second = (pipe.vae.encode(picture).latent_dist.mean for pipe in (expected, loaded))
    assert_close(first, second)
    assert expected.vae.config.scaling_factor == loaded.vae.config.scaling_factor
    for number in ("", "_2"):
        encoder = getattr(expected, f"text_encoder{number}", None)
        if encoder is None:
            continue
        texts = [
            getattr(pipe, f"tokenizer{number}")(
                ["a cat!", "two dogs"], padding="max_length", max_length=77, return_tensors="pt"
            ).input_ids
            for pipe in (expected, loaded)
        ]
        assert torch.equal(*texts)
        other = getattr(loaded, f"text_encoder{number}")
        first, second = (one(texts[0], output_hidden_states=True) for one in (encoder, other))
        assert_close(first.hidden_states[-2], second.hidden_states[-2])
        assert_close(first[0], second[0])


@pytest.mark.parametrize("name", models.BUILDERS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    pipe = models.BUILDERS[name](seed=3)
    loaded = load_checkpoint(save_ldm(pipe, tmp_path / "model.safetensors"))
    assert loaded.architecture == LABELS[name]
    assert loaded.name == "model"
    assert loaded.is_inpaint == ("inpaint" in name)
    assert loaded.is_lcm == (name == "lcm")
    assert loaded.prediction_type == pipe.scheduler.config.prediction_type
    assert_same_weights(pipe, loaded.pipeline)
    assert_same_outputs(pipe, loaded.pipeline)
    assert loaded.pipeline.unet.config.sample_size == pipe.unet.config.sample_size


@pytest.mark.parametrize("name", models.BUILDERS)
def test_picture(name: str, tmp_path: Path) -> None:
    pipe = models.BUILDERS[name](seed=3)
    loaded = load_checkpoint(save_ldm(pipe, tmp_path / "model.safetensors")).pipeline
    # 4 steps: LCM's schedule; same sampler on both sides.
    pipe.scheduler = type(loaded.scheduler).from_config(loaded.scheduler.config)
    first, second = run(pipe), run(loaded)
    assert first.shape == (64, 64, 3)
    assert abs(first - second).max() < 2e-3
    assert first.std() > 0.03


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl", "sdxl_refiner"])
def test_two_layers_and_more_levels(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": 2}
    if name == "sd15":
        options |= {"widths": (32, 64, 96, 96), "attention": (True, True, True, False)}
    pipe = models.BUILDERS[name](**options)
    loaded = load_checkpoint(save_ldm(pipe, tmp_path / "model.safetensors"))
    assert_same_weights(pipe, loaded.pipeline)
    assert_same_outputs(pipe, loaded.pipeline)


def _without_metadata(path: Path) -> None:
    save_file(load_file(path), str(path))


def test_heads_from_yaml_alone(tmp_path: Path) -> None:
    pipe = models.sd15(heads=2)
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    _without_metadata(path)
    assert_same_outputs(pipe, load_checkpoint(path).pipeline)


def test_heads_from_metadata_alone(tmp_path: Path) -> None:
    pipe = models.sd15(heads=2)
    path = save_ldm(pipe, tmp_path / "model.safetensors", with_yaml=False)
    assert not path.with_suffix(".yaml").exists()
    assert_same_outputs(pipe, load_checkpoint(path).pipeline)


def test_yaml_goes_before_metadata(tmp_path: Path) -> None:
    path = save_ldm(models.sd15(heads=2), tmp_path / "model.safetensors")
    config_path = path.with_suffix(".yaml")
    config = yaml.safe_load(config_path.read_text())
    config["model"]["params"]["unet_config"]["params"]["num_heads"] = 4
    config["model"]["params"]["parameterization"] = "v"
    config_path.write_text(yaml.safe_dump(config))
    loaded = load_checkpoint(path)
    assert loaded.pipeline.unet.config.attention_head_dim == 4
    assert loaded.prediction_type == "v_prediction"


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl", "sdxl_refiner"])
def test_defaults_with_neither(name: str, tmp_path: Path) -> None:
    # SD1: 8 heads; the others: heads of 64 channels.
    pipe = models.sd15(heads=8) if name == "sd15" else models.BUILDERS[name]()
    path = save_ldm(pipe, tmp_path / "model.safetensors", with_yaml=False)
    _without_metadata(path)
    assert_same_outputs(pipe, load_checkpoint(path).pipeline)


@pytest.mark.parametrize("name", ["sd15", "sd15_inpaint", "sd2"])
def test_yaml_as_diffusers_reads_it(name: str, tmp_path: Path) -> None:
    from diffusers.loaders import single_file_utils as reader

    pipe = models.BUILDERS[name](layers=2)
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    original = yaml.safe_load(path.with_suffix(".yaml").read_text())
    unet = reader.create_unet_diffusers_config_from_ldm(original, load_file(path))
    vae = reader.create_vae_diffusers_config_from_ldm(original, load_file(path))
    for model, config in ((pipe.unet, unet), (pipe.vae, vae)):
        for key in set(config) - {"sample_size"}:
            expected, read = model.config[key], config[key]
            same_type = tuple(read) if isinstance(expected, tuple) else read
            assert same_type == expected, key


def test_sd2_base_predicts_noise(tmp_path: Path) -> None:
    pipe = models.sd2(prediction_type="epsilon")
    loaded = load_checkpoint(save_ldm(pipe, tmp_path / "model.safetensors"))
    assert loaded.prediction_type == "epsilon"


def test_marker_tensors(tmp_path: Path) -> None:
    path = save_ldm(models.sdxl(), tmp_path / "model.safetensors")
    tensors = load_file(path)
    save_file({**tensors, "v_pred": torch.empty(0)}, str(path))
    loaded = load_checkpoint(path)
    assert (loaded.prediction_type, loaded.zero_snr) == ("v_prediction", False)
    save_file({**tensors, "v_pred": torch.empty(0), "ztsnr": torch.empty(0)}, str(path))
    loaded = load_checkpoint(path)
    assert (loaded.prediction_type, loaded.zero_snr) == ("v_prediction", True)
    assert loaded.pipeline.scheduler.config.timestep_spacing == "trailing"
    assert run(loaded.pipeline).std() > 0.03


def test_zero_snr_is_saved_with_markers(tmp_path: Path) -> None:
    pipe = models.sdxl()
    pipe.scheduler.register_to_config(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    _without_metadata(path)
    loaded = load_checkpoint(path)
    assert (loaded.prediction_type, loaded.zero_snr) == ("v_prediction", True)


def test_modelspec_metadata(tmp_path: Path) -> None:
    path = save_ldm(models.sdxl(), tmp_path / "model.safetensors")
    save_file(load_file(path), str(path), metadata={"modelspec.prediction_type": "v"})
    assert load_checkpoint(path).prediction_type == "v_prediction"


def test_half_precision_file(tmp_path: Path) -> None:
    pipe = models.sd15()
    path = save_ldm(pipe, tmp_path / "half.safetensors", dtype=torch.float16)
    assert path.stat().st_size < 14e6
    kept = load_checkpoint(path).pipeline
    assert kept.unet.dtype == kept.vae.dtype == kept.text_encoder.dtype == torch.float16
    widened = load_checkpoint(path, dtype=torch.float32).pipeline
    assert_same_weights(pipe.to(torch.float16).to(torch.float32), widened)
    assert run(widened).std() > 0.03


def test_extra_and_average_keys_are_left_out(tmp_path: Path) -> None:
    pipe = models.sd15()
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    tensors = load_file(path)
    averages = {f"model_ema.weight{n}": torch.zeros(1) for n in range(120)}
    extra = {
        "betas": torch.zeros(1000),
        "model.diffusion_model.unknown": torch.zeros(1),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
    }
    save_file({**tensors, **averages, **extra}, str(path))
    assert_same_weights(pipe, load_checkpoint(path).pipeline)


def test_old_names_of_the_text_encoder(tmp_path: Path) -> None:
    pipe = models.sd15()
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    tensors = {key.replace(".text_model.", "."): one for key, one in load_file(path).items()}
    save_file(tensors, str(path))
    assert_same_weights(pipe, load_checkpoint(path).pipeline)


def test_other_spelling_of_guidance_embedding(tmp_path: Path) -> None:
    pipe = models.lcm()
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    tensors = load_file(path)
    stem = "model.diffusion_model."
    key = f"{stem}time_embedding.cond_proj.weight"
    tensors[f"{stem}time_embed.cond_proj.weight"] = tensors.pop(key)
    save_file(tensors, str(path))
    assert_same_weights(pipe, load_checkpoint(path).pipeline)


def test_vae_beside_the_checkpoint(tmp_path: Path) -> None:
    pipe, other = models.sd15(), models.sd15(seed=9)
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    tensors = load_file(save_ldm(other, tmp_path / "other.safetensors"))
    stem = "first_stage_model."
    vae = {key.removeprefix(stem): one for key, one in tensors.items() if key.startswith(stem)}
    save_file(vae, str(tmp_path / "vae.safetensors"))
    loaded = load_checkpoint(path, vae_path=tmp_path / "vae.safetensors").pipeline
    pipe.register_modules(vae=other.vae)
    assert_same_weights(pipe, loaded)


def test_components_can_be_saved_as_a_dict(tmp_path: Path) -> None:
    pipe = models.sd15()
    loaded = load_checkpoint(save_ldm(pipe.components, tmp_path / "model.safetensors"))
    assert_same_weights(pipe, loaded.pipeline)
    assert loaded.components["unet"] is loaded.pipeline.unet


def test_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    pipe = models.sd15()
    path = save_ldm(pipe, tmp_path / "model.safetensors")
    loaded = load_checkpoint(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert_same_weights(pipe, loaded.pipeline)


def test_save_refusals(tmp_path: Path) -> None:
    pipe = models.sd15()
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        save_ldm(pipe, tmp_path / "model.ckpt")
    with pytest.raises(CheckpointError, match="no vae"):
        save_ldm({**pipe.components, "vae": None}, tmp_path / "model.safetensors")
    uneven = models.sd15(widths=(64, 96), attention=(True, False), heads=4)
    with pytest.raises(CheckpointError, match="multiples"):
        save_ldm(uneven, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_names_are_the_published_ones(tmp_path: Path) -> None:
    """Names by which WebUIs recognise the architectures."""
    expected = {
        "sd15": (
            "model.diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight",
            "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight",
            "first_stage_model.encoder.mid.attn_1.q.weight",
        ),
        "sd2": ("cond_stage_model.model.transformer.resblocks.2.attn.in_proj_weight",),
        "sdxl": (
            "conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1.weight",
            "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight",
            "conditioner.embedders.1.model.text_projection",
            "model.diffusion_model.label_emb.0.0.weight",
        ),
        "sdxl_refiner": ("conditioner.embedders.0.model.ln_final.weight",),
    }
    for name, keys in expected.items():
        path = save_ldm(models.BUILDERS[name](), tmp_path / f"{name}.safetensors")
        with safe_open(str(path), framework="pt") as handle:
            names = set(handle.keys())
            assert set(keys) <= names
            for key in names:
                if ".attn_1." in key and key.endswith("q.weight"):
                    assert len(handle.get_slice(key).get_shape()) == 4


def test_loaded_checkpoint_from_a_folder(tmp_path: Path) -> None:
    pipe = models.sdxl()
    pipe.save_pretrained(tmp_path / "model-xl")
    loaded = load_checkpoint(tmp_path / "model-xl")
    assert isinstance(loaded, LoadedCheckpoint)
    assert (loaded.architecture, loaded.name) == ("sdxl", "model-xl")
    assert_same_weights(pipe, loaded.pipeline)
    by_index = load_checkpoint(tmp_path / "model-xl" / "model_index.json")
    assert_same_weights(pipe, by_index.pipeline)


@pytest.mark.parametrize("name", ["sd15", "sd15_inpaint", "lcm", "sd2", "sdxl_refiner"])
def test_folders(name: str, tmp_path: Path) -> None:
    pipe = models.BUILDERS[name]()
    pipe.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, dtype=torch.float32)
    assert loaded.architecture == LABELS[name]
    assert loaded.is_inpaint == ("inpaint" in name)
    assert loaded.is_lcm == (name == "lcm")
    assert loaded.prediction_type == pipe.scheduler.config.prediction_type
    assert_same_weights(pipe, loaded.pipeline)
    assert run(loaded.pipeline).std() > 0.03


def test_folder_with_half_precision_variant(tmp_path: Path) -> None:
    pipe = models.sd15().to(torch.float16)
    pipe.save_pretrained(tmp_path, variant="fp16")
    loaded = load_checkpoint(tmp_path)
    assert loaded.pipeline.unet.dtype == torch.float16
    assert_same_weights(pipe, loaded.pipeline)
