"""Train the VAE on drawn scenes: L1, L1 of gradients at three scales, and a little KL."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.demo_model.concepts import read_concepts
from tools.demo_model.models import SCALE_FACTOR, build_vae, save_parts
from tools.demo_model.scenes import SceneDrawer, make_scene
from tools.demo_model.train_diffusion import compile_blocks

SIZES = ((128, 128, 14000, 96), (256, 192, 4000, 32), (256, 256, 3000, 24))
"""(height, width, number of scenes, batch size)."""


@dataclass(frozen=True)
class Plan:
    """One round of training: peak rate, weight of the KL term, share of the full batch sizes."""

    seed: int
    steps: int
    rate: float
    kl_weight: float
    batch_share: float


FROM_SCRATCH = Plan(seed=1, steps=2400, rate=1e-3, kl_weight=4e-4, batch_share=1.0)
REFINEMENT = Plan(seed=11, steps=6000, rate=7e-4, kl_weight=4e-5, batch_share=0.4)


def detail_loss(output: Tensor, target: Tensor) -> Tensor:
    """L1 of the difference and of its gradients, at full, half and quarter size."""
    error = output - target
    loss = error.abs().mean() + 0.5 * error.square().mean()
    for _ in range(3):
        loss = loss + (error[..., 1:] - error[..., :-1]).abs().mean()
        loss = loss + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
        error = functional.avg_pool2d(error, 2)
        loss = loss + 0.5 * error.abs().mean()
    return loss


def draw_pool(drawer: SceneDrawer, height_px: int, width_px: int, count: int, seed: int) -> Tensor:
    """Draw a pool of scenes: [count, 3, H, W], uint8."""
    concepts, choice = read_concepts(), Random(seed)
    scenes = [make_scene(concepts, height_px, width_px, choice) for _ in range(count)]
    batches = (scenes[i : i + 500] for i in range(0, count, 500))
    drawn = [(drawer.draw(b, height_px, width_px) * 255).round().byte() for b in batches]
    return torch.cat(drawn)


@torch.no_grad()
def fold_scale(vae: Any, pictures: Tensor) -> None:
    """Change the 1x1 convolutions so that latents have mean 0 and, times 0.18215, deviation 1.

    Args:
        vae: Changed in place; its pictures stay the same.
        pictures: [N, 3, H, W] in -1..1, to measure the latents.
    """
    with torch.autocast(pictures.device.type, torch.bfloat16):
        latents = torch.cat([vae.encode(batch).latent_dist.mean for batch in pictures.split(64)])
    latents = latents.float()
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    print("latents before folding: mean", mean.tolist(), "deviation", deviation.tolist())
    gain = 1 / (deviation * SCALE_FACTOR)
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight[:4] *= gain.view(-1, 1, 1, 1)
    quant.bias[:4] = (quant.bias[:4] - mean) * gain
    quant.bias[4:] += 2 * gain.log()
    post.bias += post.weight[:, :, 0, 0] @ mean
    post.weight /= gain.view(1, -1, 1, 1)


def train_vae(
    vae: Any, sprites: Tensor, output: Path, plan: Plan, limit_s: float, compiled: bool
) -> Any:
    """Train from a fixed seed, fold in the scale, save; return the VAE with averaged weights."""
    torch.manual_seed(plan.seed)
    device = sprites.device
    started = time.monotonic()
    drawer = SceneDrawer(sprites)
    pools = [draw_pool(drawer, h, w, count, 10 + i) for i, (h, w, count, _) in enumerate(SIZES)]
    vae.to(device, memory_format=torch.channels_last)
    average = build_vae().to(device)
    average.load_state_dict(vae.state_dict())
    weights, averages = list(vae.parameters()), list(average.parameters())
    optimizer = torch.optim.AdamW(
        weights, lr=plan.rate, betas=(0.9, 0.99), weight_decay=1e-3, fused=device.type == "cuda"
    )
    if compiled:
        compile_blocks(vae)
    for step in range(plan.steps):
        progress = max(step / plan.steps, (time.monotonic() - started) / limit_s)
        if progress >= 1:
            break
        rate = plan.rate * min(1, step / 200) * (1 - progress) ** 0.7
        for group in optimizer.param_groups:
            group["lr"] = rate
        which = 0 if step % 5 < 3 else 1 + step % 2
        batch = max(1, int(SIZES[which][3] * plan.batch_share))
        index = torch.randint(len(pools[which]), (batch,), device=device)
        pictures = pools[which][index].float().div(127.5).sub(1)
        pictures = pictures.to(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            drawn, kl = _reconstruct(vae, pictures)
        loss = detail_loss(drawn.float(), pictures) + plan.kl_weight * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - min(0.998, (step + 1) / (step + 10)))
        if step % 250 == 0:
            seconds = time.monotonic() - started
            print(
                f"vae {step} loss {loss.item():.4f} kl {kl.item():.3f} {seconds:.0f} s", flush=True
            )
    average.eval()
    fold_scale(average, pools[0][:2000].float().div(127.5).sub(1))
    save_parts({"vae": average}, output, "vae")
    return average


def _reconstruct(vae: Any, pictures: Tensor) -> tuple[Tensor, Tensor]:
    posterior = vae.encode(pictures).latent_dist
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    latents = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return vae.decode(latents).sample, kl
