"""Small random files that fit the demo checkpoint, for a WebUI of the A1111 family.

    python -m tests.support.live_files /path/to/webui

writes LyCORIS networks, a hypernetwork, a ControlNet and a small SDXL checkpoint into its
``models``. They draw nothing sensible; they change pictures visibly, which is what tests need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onediff_ext.hosts.diffusers.checkpoints.ldm_saving import save_ldm
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from tests.support import models
from tools.demo_model.export import CLIP_FOLDER

ASSETS = Path(__file__).resolve().parents[2] / "onediff_ext" / "assets"
DEMO = ASSETS / "demo" / "onediff-demo.safetensors"
UNET = "model.diffusion_model."
RANK = 4
# Of the second text encoder: the smallest that open_clip knows by name.
OPEN_CLIP, OPEN_CLIP_WIDTH, OPEN_CLIP_LAYERS = "ViT-S-32-alt", 256, 10
TEXT_WIDTH, TIME_IDS_WIDTH = 96, 32

# How a layer of a UNet is changed: its weight → the network's tensors, by their names.
Maker = Callable[[torch.Tensor, "Noise"], dict[str, torch.Tensor]]


class Noise:
    """Seeded noise, made on a device."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        generator = self._generator
        return scale * torch.randn(*shape, generator=generator, device=generator.device)


def loha(weight: torch.Tensor, noise: Noise) -> dict[str, torch.Tensor]:
    """Two products, multiplied by each other."""
    rows, columns = weight.shape[0], weight[0].numel()
    size = float(weight.std()) ** 0.5 * RANK**-0.5
    return {
        f"hada_w{n}_{part}": noise(*shape, scale=size**0.5)
        for n in (1, 2)
        for part, shape in (("a", (rows, RANK)), ("b", (RANK, columns)))
    } | {"alpha": torch.tensor(float(RANK))}


def lokr(weight: torch.Tensor, noise: Noise) -> dict[str, torch.Tensor]:
    """A Kronecker product."""
    rows, columns = weight.shape[:2]
    parts = {
        "lokr_w1": noise(4, 4),
        "lokr_w2": noise(rows // 4, columns // 4, *weight.shape[2:], scale=0.5 * weight.std()),
    }
    return parts | {"alpha": torch.tensor(1.0)}


def full(weight: torch.Tensor, noise: Noise) -> dict[str, torch.Tensor]:
    """A whole weight."""
    return {"diff": noise(*weight.shape, scale=0.5 * float(weight.std()))}


def ia3(weight: torch.Tensor, noise: Noise) -> dict[str, torch.Tensor]:
    """A factor for each input."""
    return {"weight": noise(weight.shape[1], scale=0.7), "on_input": torch.tensor(True)}


def glora(weight: torch.Tensor, noise: Noise) -> dict[str, torch.Tensor]:
    """A low-rank sum and a low-rank factor."""
    rows, columns = weight.shape
    size = float(weight.std())
    return {
        "a1.weight": noise(RANK, columns, scale=columns**-0.5),
        "a2.weight": noise(columns, RANK, scale=columns**-0.5),
        "b1.weight": noise(RANK, columns, scale=size),
        "b2.weight": noise(rows, RANK, scale=RANK**-0.5),
        "alpha": torch.tensor(float(RANK)),
    }


def dora(weight: torch.Tensor, noise: Noise) -> dict[str, torch.Tensor]:
    """A LoRA with lengths of its own."""
    rows, columns = weight.shape
    return {
        "lora_up.weight": noise(rows, RANK, scale=float(weight.std())),
        "lora_down.weight": noise(RANK, columns, scale=RANK**-0.5),
        "dora_scale": weight.norm(dim=0, keepdim=True) * (1 + noise(1, columns, scale=0.3)),
        "alpha": torch.tensor(float(RANK)),
    }


def norm(weight: torch.Tensor, noise: Noise) -> dict[str, torch.Tensor]:
    """Norms' weights and biases."""
    return {
        "w_norm": noise(*weight.shape, scale=0.3),
        "b_norm": noise(*weight.shape, scale=0.3),
    }


def linear(weight: torch.Tensor) -> bool:
    return weight.ndim == 2


def linear_or_conv(weight: torch.Tensor) -> bool:
    return weight.ndim in (2, 4) and all(n % 4 == 0 for n in weight.shape[:2])


def vector(weight: torch.Tensor) -> bool:
    return weight.ndim == 1


NETWORKS: Mapping[str, tuple[Maker, Callable[[torch.Tensor], bool]]] = {
    "loha": (loha, linear_or_conv),
    "lokr": (lokr, linear_or_conv),
    "full": (full, linear_or_conv),
    "ia3": (ia3, linear),
    "glora": (glora, linear),
    "dora": (dora, linear),
    "norm": (norm, vector),
}


def network(name: str, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a LyCORIS network.

    Args:
        name: One of `NETWORKS`.
        weights: Of a checkpoint with SD1's layout.
    """
    make, wanted = NETWORKS[name]
    noise, tensors = Noise(sorted(NETWORKS).index(name)), {}
    for key, weight in _layers(weights):
        if wanted(weight):
            layer = "lora_unet_" + key.replace(".", "_")
            made = make(weight.float(), noise)
            tensors |= {f"{layer}.{part}": one.contiguous() for part, one in made.items()}
    return tensors


def hypernetwork(width: int = TEXT_WIDTH) -> dict[object, object]:
    """A hypernetwork for contexts of this width, as A1111 stores one."""
    noise = Noise(0)

    def module() -> dict[str, torch.Tensor]:
        return {
            "linear.0.weight": noise(2 * width, width, scale=width**-0.5),
            "linear.0.bias": noise(2 * width, scale=0.1),
            "linear.1.weight": noise(width, 2 * width, scale=width**-0.5),
            "linear.1.bias": noise(width, scale=0.1),
        }

    return {
        width: (module(), module()),
        "step": 1,
        "name": "tiny-hypernetwork",
        "layer_structure": [1, 2, 1],
        "activation_func": "linear",
        "is_layer_norm": False,
        "use_dropout": False,
    }


def save_sdxl(path: Path) -> None:
    """A small SDXL checkpoint with the demo's first text encoder and VAE, and its .yaml."""
    demo = load_checkpoint(DEMO, dtype=torch.float32)
    context = TEXT_WIDTH + OPEN_CLIP_WIDTH
    parts = dict(models.sdxl().components)
    parts["text_encoder"] = demo.components["text_encoder"]
    parts["text_encoder_2"] = models.text_encoder(
        OPEN_CLIP_WIDTH, OPEN_CLIP_LAYERS, hidden_act="gelu", projection=True
    )
    parts["vae"] = demo.components["vae"]
    parts["unet"] = models.unet(
        (32, 64, 128),
        attention=(False, True, True),
        heads=(1, 1, 2),
        depths=(1, 2, 3),
        context_dim=context,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_IDS_WIDTH,
        projection_class_embeddings_input_dim=OPEN_CLIP_WIDTH + 6 * TIME_IDS_WIDTH,
    )
    save_ldm(parts, path, dtype=torch.float16)
    path.with_suffix(".yaml").write_text(
        SDXL_YAML.format(
            adm=OPEN_CLIP_WIDTH + 6 * TIME_IDS_WIDTH,
            context=context,
            ids=TIME_IDS_WIDTH,
            clip=CLIP_FOLDER,
            open_clip=OPEN_CLIP,
            scale=demo.components["vae"].config["scaling_factor"],
        ),
        encoding="utf-8",
    )


def controlnet(unet: Any, strength: float = 0.3) -> dict[str, torch.Tensor]:
    """A ControlNet with a UNet's encoder and random outputs, in diffusers' layout."""
    model = models.controlnet_for(unet)
    # The widths that the original layout's hint encoder has at every size of UNet.
    fitting = type(model)(
        **{**model.config, "conditioning_embedding_out_channels": (16, 32, 96, 256)}
    )
    models.randomize(fitting, 5)
    for name in ("time_embedding", "down_blocks", "mid_block"):
        getattr(fitting, name).load_state_dict(getattr(unet, name).state_dict(), strict=False)
    for conv in (*fitting.controlnet_down_blocks, fitting.controlnet_mid_block):
        conv.weight.data.mul_(strength)
    return {key: weight.contiguous() for key, weight in fitting.state_dict().items()}


def _layers(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, weight in sorted(weights.items()):
        if key.startswith(UNET) and key.endswith(".weight"):
            yield key[len(UNET) : -len(".weight")], weight


SDXL_YAML = """\
model:
  target: sgm.models.diffusion.DiffusionEngine
  params:
    scale_factor: {scale}
    disable_first_stage_autocast: true
    denoiser_config:
      target: sgm.modules.diffusionmodules.denoiser.DiscreteDenoiser
      params:
        num_idx: 1000
        weighting_config:
          target: sgm.modules.diffusionmodules.denoiser_weighting.EpsWeighting
        scaling_config:
          target: sgm.modules.diffusionmodules.denoiser_scaling.EpsScaling
        discretization_config:
          target: sgm.modules.diffusionmodules.discretizer.LegacyDDPMDiscretization
    network_config:
      target: sgm.modules.diffusionmodules.openaimodel.UNetModel
      params:
        adm_in_channels: {adm}
        num_classes: sequential
        use_checkpoint: false
        in_channels: 4
        out_channels: 4
        model_channels: 32
        attention_resolutions: [4, 2]
        num_res_blocks: 1
        channel_mult: [1, 2, 4]
        num_head_channels: 64
        use_spatial_transformer: true
        use_linear_in_transformer: true
        transformer_depth: [1, 2, 3]
        context_dim: {context}
        spatial_transformer_attn_type: softmax-xformers
        legacy: false
    conditioner_config:
      target: sgm.modules.GeneralConditioner
      params:
        emb_models:
        - is_trainable: false
          input_key: txt
          target: sgm.modules.encoders.modules.FrozenCLIPEmbedder
          params:
            version: {clip}
            layer: hidden
            layer_idx: 2
        - is_trainable: false
          input_key: txt
          target: sgm.modules.encoders.modules.FrozenOpenCLIPEmbedder2
          params:
            arch: {open_clip}
            version: none
            freeze: true
            layer: penultimate
            always_return_pooled: true
            legacy: false
        - is_trainable: false
          input_key: original_size_as_tuple
          target: sgm.modules.encoders.modules.ConcatTimestepEmbedderND
          params:
            outdim: {ids}
        - is_trainable: false
          input_key: crop_coords_top_left
          target: sgm.modules.encoders.modules.ConcatTimestepEmbedderND
          params:
            outdim: {ids}
        - is_trainable: false
          input_key: target_size_as_tuple
          target: sgm.modules.encoders.modules.ConcatTimestepEmbedderND
          params:
            outdim: {ids}
    first_stage_config:
      target: sgm.models.autoencoder.AutoencoderKLInferenceWrapper
      params:
        embed_dim: 4
        monitor: val/rec_loss
        ddconfig:
          attn_type: vanilla-xformers
          double_z: true
          z_channels: 4
          resolution: 256
          in_channels: 3
          out_ch: 3
          ch: 64
          ch_mult: [1, 1, 1, 2]
          num_res_blocks: 2
          attn_resolutions: []
          dropout: 0.0
        lossconfig:
          target: torch.nn.Identity
"""


def main(root: Path) -> None:
    """Write everything into a WebUI's folder."""
    folder = root / "models"
    for name in ("Lora", "hypernetworks", "ControlNet", "Stable-diffusion"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    weights = load_file(str(DEMO))
    for name in NETWORKS:
        save_file(network(name, weights), str(folder / "Lora" / f"tiny-{name}.safetensors"))
    # A1111 takes a new archive for a malicious one.
    path = folder / "hypernetworks" / "tiny-hypernetwork.pt"
    torch.save(hypernetwork(), path, _use_new_zipfile_serialization=False)
    unet = load_checkpoint(DEMO, dtype=torch.float32).components["unet"]
    save_file(controlnet(unet), str(folder / "ControlNet" / "tiny-controlnet.safetensors"))
    save_sdxl(folder / "Stable-diffusion" / "tiny-xl.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
