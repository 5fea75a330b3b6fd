"""Slim models with random weights, for tests of WebUIs. They draw nothing sensible.

A1111 loads the demo checkpoint. Forge and its descendants take a model's form from the shapes of
its weights, if its first level is 320 wide and its prompts are as wide as SD1.5's or SDXL's. So
all levels of these are 320 wide. The text encoders have few layers and the VAE has about a
quarter of the usual width; `WebUI.slim_configs` tells the host so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onediff_ext.hosts.diffusers.checkpoints.ldm_names import to_ldm_unet, to_ldm_vae
from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from tests.support import adapter_weights, models
from tests.support import live_files as files
from tools.hosts.flux_models import write_flux_models
from tools.hosts.forms import TEXT_LAYERS, VAE_WIDTHS
from tools.hosts.lumina_models import write_lumina, write_z_image
from tools.hosts.neo_forms import EDITING
from tools.hosts.neo_models import LATENT, write_klein, write_mugen
from tools.hosts.qwen_models import write_anima, write_qwen_image
from tools.hosts.sd3_models import write_sd3_models
from tools.hosts.taesd_models import write_taesd

_CLIP_L, _CLIP_G = 768, 1280
_WIDTH = 320
_HINT = "controlnet_cond_embedding"

Tensors = Mapping[str, torch.Tensor]


def write_demo_models(folder: Path) -> None:
    """Write the demo checkpoint, one with other weights, and what fits them.

    Args:
        folder: The WebUI's ``models``.
    """
    demo = load_file(str(files.DEMO))
    noise = files.Noise(1)
    other = {
        key: weight + noise(*weight.shape, scale=0.05 * float(weight.float().std())).to(weight)
        if key.startswith(files.UNET) and weight.ndim > 1
        else weight
        for key, weight in demo.items()
    }
    yaml = files.DEMO.with_suffix(".yaml").read_text(encoding="utf-8")
    for name, tensors in (("onediff-demo", demo), ("onediff-demo-other", other)):
        path = folder / "Stable-diffusion" / f"{name}.safetensors"
        _save(tensors, path)
        path.with_suffix(".yaml").write_text(yaml, encoding="utf-8")
    parts = load_checkpoint(files.DEMO, dtype=torch.float32).components
    _write_loras(folder / "Lora", parts)
    _write_vae(folder / "VAE", parts["vae"])
    write_taesd(folder)
    files.main(folder.parent)


def write_slim_models(folder: Path) -> None:
    """Write slim checkpoints of SD1.5, SD1.5 for inpainting, SDXL, Mugen and transformers.

    LoRAs, a ControlNet and a VAE fit them.

    Args:
        folder: The WebUI's ``models``.
    """
    checkpoints: Mapping[str, Callable[[], Mapping[str, Any]]] = {
        "slim-a": lambda: sd1(1),
        "slim-b": lambda: sd1(2),
        "slim-inpainting": lambda: sd1(3, in_channels=9),
        "slim-xl": lambda: sdxl(4),
    }
    for name, make in checkpoints.items():
        path = folder / "Stable-diffusion" / f"{name}.safetensors"
        save_ldm(make(), path, dtype=torch.float16, with_yaml=False)
    write_flux_models(folder)
    write_sd3_models(folder)
    write_transformers(folder)
    write_mugen(folder, sdxl(5, LATENT))
    first = sd1(1)
    _write_loras(folder / "Lora", first)
    _write_vae(folder / "VAE", first["vae"])
    write_taesd(folder)
    weights = load_file(str(folder / "Stable-diffusion" / "slim-a.safetensors"))
    for name in ("loha", "lokr"):
        _save(files.network(name, weights), folder / "Lora" / f"tiny-{name}.safetensors")
    # Strong enough to be seen where it works in the middle steps only.
    controlnet = to_ldm_controlnet(files.controlnet(first["unet"], 1.0), first["unet"].config)
    _save(controlnet, folder / "ControlNet" / "slim-controlnet.safetensors")


def write_transformers(folder: Path) -> None:
    """Write slim checkpoints of the transformers that Neo alone has, and a LoRA for each.

    Args:
        folder: The WebUI's ``models``, which has the slim checkpoint of Flux.1.
    """
    for write in (write_klein, write_z_image, write_lumina, write_qwen_image, write_anima):
        write(folder)
    # Neo tells models that edit pictures by the names of their files.
    checkpoints = folder / "Stable-diffusion"
    for name, drawing in EDITING.items():
        path = checkpoints / f"{name}.safetensors"
        path.unlink(missing_ok=True)
        path.hardlink_to(checkpoints / f"{drawing}.safetensors")


def sd1(seed: int, in_channels: int = 4) -> dict[str, Any]:
    """The components of a slim SD1.5, with a UNet of 111 M parameters."""
    return _components(models.sd15(seed)) | {
        "unet": models.unet(
            (_WIDTH,) * 4,
            seed=seed,
            attention=(True, True, True, False),
            heads=8,
            in_channels=in_channels,
            context_dim=_CLIP_L,
            layers=2,
        ),
        "text_encoder": models.text_encoder(_CLIP_L, TEXT_LAYERS, seed=seed),
        "vae": vae(seed),
    }


def sdxl(seed: int, channels: int = 4) -> dict[str, Any]:
    """The components of a slim SDXL, with a UNet of 283 M parameters.

    Args:
        seed: Of the weights.
        channels: Of the UNet's latents.
    """
    return _components(models.sdxl(seed)) | {
        "unet": models.unet(
            (_WIDTH,) * 3,
            seed=seed,
            attention=(False, True, True),
            heads=5,
            depths=(1, 2, 10),
            in_channels=channels,
            out_channels=channels,
            context_dim=_CLIP_L + _CLIP_G,
            layers=2,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=_CLIP_G + 6 * 256,
        ),
        "text_encoder": models.text_encoder(_CLIP_L, TEXT_LAYERS, seed=seed),
        "text_encoder_2": models.text_encoder(
            _CLIP_G, TEXT_LAYERS, seed=seed, hidden_act="gelu", projection=True
        ),
        "vae": vae(seed, scaling_factor=0.13025),
    }


def vae(seed: int, scaling_factor: float = 0.18215) -> Any:
    """A VAE of about a quarter of the usual width."""
    return models.vae(VAE_WIDTHS, seed=seed, layers=2, scaling_factor=scaling_factor)


def to_ldm_controlnet(weights: Tensors, unet_config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Rename a diffusers ControlNet's tensors: hosts read widths from the original layout only.

    Args:
        weights: Its state dict.
        unet_config: The config of the UNet that it is made for.

    Returns:
        Keys of the original layout, with ``control_model.``, → tensors.
    """
    renamed, encoder = {}, {}
    hints = sum(key.startswith(f"{_HINT}.blocks.") for key in weights) // 2
    for key, weight in weights.items():
        *path, kind = key.split(".")
        if path[0] == "controlnet_down_blocks":
            renamed[f"zero_convs.{path[1]}.0.{kind}"] = weight
        elif path[0] == "controlnet_mid_block":
            renamed[f"middle_block_out.0.{kind}"] = weight
        elif path[0] == _HINT:  # between two convolutions is an activation
            numbers = {"conv_in": 0, "conv_out": hints + 1}
            number = int(path[2]) + 1 if path[1] == "blocks" else numbers[path[1]]
            renamed[f"input_hint_block.{2 * number}.{kind}"] = weight
        else:
            encoder[key] = weight
    for key, weight in to_ldm_unet(encoder, unet_config).items():
        renamed[key.removeprefix(files.UNET)] = weight
    return {f"control_model.{key}": weight for key, weight in renamed.items()}


def _components(pipe: Any) -> dict[str, Any]:
    """A diffusers pipeline's models, whose property has no type."""
    return dict(pipe.components)


def _write_loras(folder: Path, parts: Mapping[str, Any]) -> None:
    pipe = SimpleNamespace(**parts)
    for seed, name in enumerate(("random-a", "random-b")):
        _save(
            adapter_weights.lora_tensors(pipe, "kohya", seed=seed), folder / f"{name}.safetensors"
        )


def _write_vae(folder: Path, own: Any) -> None:
    """A VAE that draws otherwise than a checkpoint's own: its decoder's last layer is darker."""
    weights = {key: weight.clone() for key, weight in own.state_dict().items()}
    weights["decoder.conv_out.weight"] *= 0.5
    prefix = "first_stage_model."
    renamed = to_ldm_vae(weights, own.config)
    _save(
        {key.removeprefix(prefix): weight for key, weight in renamed.items()},
        folder / "other-vae.safetensors",
    )


def _save(tensors: Tensors, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: weight.contiguous() for key, weight in tensors.items()}, str(path))
