"""Train a part of the demo model; README.md has the commands in order.

python train.py vae --sprites S.npz --output OUT --limit-s 300
python train.py main --sprites S.npz --parts PARTS --output OUT --limit-s 540
python train.py lora --sprites S.npz --model M.safetensors --output OUT --limit-s 90
python train.py controlnet --sprites S.npz --model M.safetensors --output OUT --limit-s 180
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from models import build_text_encoder, build_unet, build_vae, load_parts, save_parts, text_core
from transformers import CLIPTextModel


def load_sprites(path: Path, device: torch.device) -> torch.Tensor:
    """Sprites [N, 256, 256, 4], uint8."""
    return torch.from_numpy(np.load(path)["sprites"]).to(device)


def run_vae(arguments: argparse.Namespace, device: torch.device) -> None:
    from sample import contact_sheet
    from scenes import SceneDrawer
    from train_vae import FROM_SCRATCH, REFINEMENT, draw_pool, train_vae

    sprites, vae = load_sprites(arguments.sprites, device), build_vae()
    fresh = arguments.parts is None
    if not fresh:
        load_parts({"vae": vae}, arguments.parts.glob("vae-*.safetensors"))
    plan = FROM_SCRATCH if fresh else REFINEMENT
    vae = train_vae(vae, sprites, arguments.output, plan, arguments.limit_s, arguments.compile)
    rows = []
    for height_px, width_px in ((128, 128), (192, 256)):
        pictures = draw_pool(SceneDrawer(sprites), height_px, width_px, 12, 3).float() / 255
        with torch.no_grad():
            drawn = vae.decode(vae.encode(pictures * 2 - 1).latent_dist.mean).sample / 2 + 0.5
        rows += [list(pictures), list(drawn.clamp(0, 1))]
        error = (drawn.clamp(0, 1) - pictures).square().mean()
        print(f"{height_px}x{width_px}: PSNR {-10 * error.log10().item():.1f} dB")
    contact_sheet(rows).save(arguments.output / "vae.png")


def run_main(arguments: argparse.Namespace, device: torch.device) -> None:
    from latents import load_tokenizer, make_buckets, tokenize
    from sample import draw_sheet
    from scenes import SceneDrawer
    from train_diffusion import Schedule, Trainer, compile_blocks, predictor

    started = time.monotonic()
    torch.manual_seed(2)
    vae, unet, text_encoder = build_vae(), build_unet(), build_text_encoder()
    load_parts({"vae": vae}, arguments.parts.glob("vae-*.safetensors"))
    stored = sorted(arguments.parts.glob("main-*.safetensors"))
    if stored:
        load_parts({"unet": unet, "text": text_core(text_encoder)}, stored)
    vae.to(device).eval().requires_grad_(False)
    unet.to(device, memory_format=torch.channels_last)
    text_encoder.to(device)
    drawer = SceneDrawer(load_sprites(arguments.sprites, device))
    buckets = make_buckets(vae, drawer, device, arguments.share)
    print(f"data after {time.monotonic() - started:.0f} s", flush=True)
    deviation = torch.cat([b.latents.flatten()[:1_000_000] for b in buckets]).float().std()
    print(f"latents' deviation {deviation.item():.3f}")
    if arguments.compile:
        compile_blocks(unet)
    limit_s = arguments.limit_s - (time.monotonic() - started)
    schedule = Schedule(arguments.steps, limit_s, arguments.rate, arguments.last_share)
    trainer = Trainer(
        predictor(unet, text_encoder),
        [*unet.parameters(), *text_encoder.parameters()],
        buckets,
        tokenize(load_tokenizer(), [""]).to(device),
        schedule,
    )
    trainer.run(seed=arguments.seed)
    print(f"trained after {time.monotonic() - started:.0f} s", flush=True)
    save_parts({"unet": unet, "text": text_core(text_encoder)}, arguments.output, "main")
    unet.eval()
    torch.compiler.set_stance("force_eager")
    draw_sheet((unet, text_encoder, vae)).save(arguments.output / "main.png")
    print(f"done after {time.monotonic() - started:.0f} s", flush=True)


def load_finished(
    arguments: argparse.Namespace, device: torch.device
) -> tuple[UNet2DConditionModel, CLIPTextModel, AutoencoderKL]:
    """The trained UNet, text encoder and VAE, frozen."""
    from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint

    pipeline = load_checkpoint(arguments.model, dtype=torch.float32).pipeline
    parts = (pipeline.unet, pipeline.text_encoder, pipeline.vae)
    for part in parts:
        part.to(device).eval().requires_grad_(False)
    return parts


def run_lora(arguments: argparse.Namespace, device: torch.device) -> None:
    from latents import load_tokenizer, make_buckets, tokenize
    from sample import draw_sheet
    from scenes import SceneDrawer
    from train_adapters import SKETCH, train_lora
    from train_diffusion import Schedule, predictor

    started = time.monotonic()
    torch.manual_seed(3)
    unet, text_encoder, vae = parts = load_finished(arguments, device)
    drawer = SceneDrawer(load_sprites(arguments.sprites, device))
    buckets = make_buckets(vae, drawer, device, arguments.share, SKETCH)
    limit_s = arguments.limit_s - (time.monotonic() - started)
    schedule = Schedule(arguments.steps, limit_s, arguments.rate, arguments.last_share, 100, 0.998)
    empty_ids = tokenize(load_tokenizer(), [""]).to(device)
    path = arguments.output / "onediff-demo-sketch-lora.safetensors"
    train_lora(unet, predictor(unet, text_encoder), buckets, empty_ids, schedule, path)
    draw_sheet(parts).save(arguments.output / "lora.png")


def run_controlnet(arguments: argparse.Namespace, device: torch.device) -> None:
    from latents import load_tokenizer, make_buckets, tokenize
    from sample import draw_controlled_sheet
    from scenes import SceneDrawer
    from train_adapters import EDGES, make_controlnet, train_controlnet
    from train_diffusion import Schedule

    started = time.monotonic()
    torch.manual_seed(4)
    unet, text_encoder, vae = parts = load_finished(arguments, device)
    controlnet = make_controlnet(unet).to(device).requires_grad_(True)
    drawer = SceneDrawer(load_sprites(arguments.sprites, device))
    buckets = make_buckets(vae, drawer, device, arguments.share, EDGES)
    limit_s = arguments.limit_s - (time.monotonic() - started)
    schedule = Schedule(
        arguments.steps, limit_s, arguments.rate, arguments.last_share, 100, 0.998, 0.35
    )
    empty_ids = tokenize(load_tokenizer(), [""]).to(device)
    folder = arguments.output / "controlnet-edges"
    train_controlnet((unet, text_encoder), controlnet, buckets, empty_ids, schedule, folder)
    draw_controlled_sheet(parts, controlnet, drawer).save(arguments.output / "controlnet.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stage", choices=tuple(STAGES))
    parser.add_argument("--sprites", type=Path, required=True, help="what prepare_data.py wrote")
    parser.add_argument("--parts", type=Path, help="folder of parts trained before")
    parser.add_argument("--model", type=Path, help="the finished checkpoint, for the last two")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--steps", type=int, default=10**6)
    parser.add_argument("--limit-s", type=float, default=10**6, help="end by then, rate at zero")
    parser.add_argument("--rate", type=float, default=1.2e-3, help="peak learning rate")
    parser.add_argument("--last-share", type=float, default=0.03, help="of the rate, at the end")
    parser.add_argument("--share", type=float, default=1.0, help="part of the training set")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="compile the UNet's blocks")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    STAGES[arguments.stage](arguments, device)


STAGES = {"vae": run_vae, "main": run_main, "lora": run_lora, "controlnet": run_controlnet}


if __name__ == "__main__":
    main()
