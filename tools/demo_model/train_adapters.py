"""Train the style LoRA and the edge ControlNet on the finished model, whose weights stay."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from filters import edges, sketch
from latents import BlockKind, Bucket
from models import encode_text
from safetensors.torch import save_file
from torch import Tensor
from train_diffusion import Predict, Schedule, Trainer
from transformers import CLIPTextModel

SKETCH = BlockKind(style=sketch, batch_share=0.25)
EDGES = BlockKind(hint=edges, batch_share=0.25)

LORA_RANK = 8

LORA_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "net.0.proj", "net.2"]
"""Every matrix of the UNet's transformers."""


def train_lora(
    unet: UNet2DConditionModel,
    predict: Predict,
    buckets: list[Bucket],
    empty_ids: Tensor,
    schedule: Schedule,
    path: Path,
) -> None:
    """Train a LoRA of the UNet and save it with kohya's names, fp16."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=LORA_RANK, target_modules=LORA_LAYERS, lora_alpha=LORA_RANK))
    weights = [weight for weight in unet.parameters() if weight.requires_grad]
    Trainer(predict, weights, buckets, empty_ids, schedule).run(seed=21)
    tensors = {}
    for key, tensor in get_peft_model_state_dict(unet).items():
        module, factor = key.removesuffix(".weight").rsplit(".", 1)
        name = f"lora_unet_{module.replace('.', '_')}"
        which = {"lora_A": "lora_down", "lora_B": "lora_up"}[factor]
        tensors[f"{name}.{which}.weight"] = tensor.half().contiguous().cpu()
        tensors[f"{name}.alpha"] = torch.tensor(float(LORA_RANK)).half()
    metadata = {"ss_network_dim": str(LORA_RANK), "ss_network_alpha": str(LORA_RANK)}
    save_file(tensors, path, metadata={**metadata, "ss_network_module": "networks.lora"})


def make_controlnet(unet: UNet2DConditionModel) -> ControlNetModel:
    """A ControlNet that starts as a copy of the UNet's first half."""
    return ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 64, 96))


def train_controlnet(
    parts: tuple[UNet2DConditionModel, CLIPTextModel],
    controlnet: ControlNetModel,
    buckets: list[Bucket],
    empty_ids: Tensor,
    schedule: Schedule,
    folder: Path,
) -> None:
    """Train the ControlNet alone and save its folder, fp16."""
    unet, text_encoder = parts
    unet.requires_grad_(False)
    text_encoder.requires_grad_(False)

    def predict(noisy: Tensor, times: Tensor, token_ids: Tensor, hints: Tensor | None) -> Tensor:
        context = encode_text(text_encoder, token_ids)
        down, middle = controlnet(noisy, times, context, hints, return_dict=False)
        return unet(
            noisy, times, context, down_block_additional_residuals=down,
            mid_block_additional_residual=middle, return_dict=False,
        )[0]  # fmt: skip

    Trainer(predict, list(controlnet.parameters()), buckets, empty_ids, schedule).run(seed=22)
    controlnet.half().save_pretrained(folder)
    controlnet.float()
