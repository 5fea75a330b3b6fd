"""Train UNet and text encoder together: noise prediction, min-SNR weights, averaged weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from tools.demo_model.latents import Bucket
from tools.demo_model.models import alphas_cumprod, encode_text

Predict = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(noisy latents [B, 4, h, w], times [B], token ids [B, 77], hints [B, 3, H, W]) -> noise."""

SNR_CAP = 5.0
"""Hang et al. 2023, arXiv:2303.09556."""

OFFSET = 0.1
"""Share of noise that is constant over a channel, so that captions decide plain backgrounds."""


@dataclass(frozen=True)
class Schedule:
    """How long to train and how fast.

    Attributes:
        limit_s: Seconds from the trainer's creation until the learning rate reaches its end.
        averaging: Share of the averaged weights that a step keeps.
        empty_share: Share of empty captions, for classifier-free guidance.
    """

    steps: int
    limit_s: float
    peak_rate: float = 1.2e-3
    last_share: float = 0.03
    warmup_steps: int = 300
    averaging: float = 0.9995
    empty_share: float = 0.1

    def rate(self, step: int, progress: float) -> float:
        """The learning rate: a linear warm-up, then a line down to the last share."""
        falling = 1 - (1 - self.last_share) * progress
        return self.peak_rate * min(1.0, (step + 1) / self.warmup_steps) * falling


def diffusion_loss(
    predict: Predict, latents: Tensor, token_ids: Tensor, hints: Tensor | None, kept: Tensor
) -> Tensor:
    """The weighted squared error of the predicted noise.

    Args:
        predict: The model.
        latents: [B, 4, h, w], deviation 1.
        token_ids: [B, 77], empty captions put in already.
        hints: What a ControlNet follows, [B, 3, H, W], or None.
        kept: [1000], the remaining share of the picture's variance at each time.
    """
    batch = len(latents)
    noise = torch.randn_like(latents)
    noise = noise + OFFSET * torch.randn(batch, 4, 1, 1, device=latents.device)
    times = torch.randint(0, 1000, (batch,), device=latents.device)
    left = kept[times].view(-1, 1, 1, 1)
    noisy = left.sqrt() * latents + (1 - left).sqrt() * noise
    error = (predict(noisy, times, token_ids, hints).float() - noise).square().mean((1, 2, 3))
    snr = (left / (1 - left)).flatten()
    return (error * snr.clamp(max=SNR_CAP) / snr).mean()


class Trainer:
    """Trains with one size for each step; on a GPU a whole step of a size is one CUDA graph."""

    def __init__(
        self,
        predict: Predict,
        weights: list[nn.Parameter],
        buckets: list[Bucket],
        empty_ids: Tensor,
        schedule: Schedule,
    ) -> None:
        self.predict, self.weights, self.buckets = predict, weights, buckets
        self.empty_ids, self.schedule = empty_ids, schedule
        self.created = time.monotonic()
        self.device = weights[0].device
        self.captured = self.device.type == "cuda"
        self.averages = [weight.detach().clone() for weight in weights]
        self.rate = torch.tensor(0.0, device=self.device)
        self.share = torch.tensor(1.0, device=self.device)
        self.kept = alphas_cumprod(self.device)
        self.loss = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            weights, lr=self.rate, betas=(0.9, 0.99), weight_decay=1e-2,
            fused=self.captured, capturable=self.captured,
        )  # fmt: skip
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _step(self, bucket: Bucket) -> None:
        rows = torch.randint(len(bucket.latents), (bucket.batch,), device=self.device)
        latents = bucket.latents[rows].float().contiguous(memory_format=torch.channels_last)
        empty = torch.rand(bucket.batch, 1, device=self.device) < self.schedule.empty_share
        token_ids = torch.where(empty, self.empty_ids, bucket.token_ids[rows])
        hints = None
        if bucket.hints is not None:
            hints = (bucket.hints[rows].float() / 255).expand(-1, 3, -1, -1)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            loss = diffusion_loss(self.predict, latents, token_ids, hints, self.kept)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            self.loss.lerp_(loss.detach(), 0.02)
            weights = [weight.detach() for weight in self.weights]
            moves = torch._foreach_sub(weights, self.averages)
            torch._foreach_mul_(moves, self.share)
            torch._foreach_add_(self.averages, moves)

    def step(self, index: int) -> None:
        """Run one step on bucket `index`; on a GPU the first use records a CUDA graph."""
        if not self.captured:
            self._step(self.buckets[index])
            return
        if index not in self._graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._step(self.buckets[index])
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self._step(self.buckets[index])
            self._graphs[index] = graph
        self._graphs[index].replay()

    def run(self, seed: int) -> None:
        """Train by the schedule; at the end the modules get the averaged weights."""
        choice, schedule = Random(seed), self.schedule
        self.share.fill_(0.0)
        for index in range(len(self.buckets)):
            self.step(index)
        with torch.no_grad():
            torch._foreach_copy_(self.averages, [weight.detach() for weight in self.weights])
        print(f"captured after {time.monotonic() - self.created:.0f} s", flush=True)
        started = time.monotonic()
        limit_s = schedule.limit_s - (started - self.created)
        for step in range(schedule.steps):
            seconds = time.monotonic() - started
            progress = max(step / schedule.steps, seconds / limit_s)
            if progress >= 1:
                break
            self.rate.fill_(schedule.rate(step, progress))
            self.share.fill_(1 - min(schedule.averaging, (step + 1) / (step + 10)))
            sizes = range(len(self.buckets))
            self.step(choice.choices(sizes, weights=[b.weight for b in self.buckets])[0])
            if step % 50 == 0 and self.captured:
                torch.cuda.synchronize()  # or the clock runs ahead of the work
            if step % 500 == 0:
                print(f"step {step} loss {self.loss.item():.4f} {seconds:.0f} s", flush=True)
        print(f"{step} steps in {time.monotonic() - started:.0f} s", flush=True)
        with torch.no_grad():
            torch._foreach_copy_([weight.detach() for weight in self.weights], self.averages)


def predictor(unet: Any, text_encoder: Any) -> Predict:
    """Return the whole model as one function."""

    def predict(noisy: Tensor, times: Tensor, token_ids: Tensor, _hints: Tensor | None) -> Tensor:
        noise: Tensor = unet(noisy, times, encode_text(text_encoder, token_ids), return_dict=False)[
            0
        ]
        return noise

    return predict


def compile_blocks(model: nn.Module) -> None:
    """Compile a model's blocks, one graph for each block kind and all sizes; replaces `forward`."""
    import torch._dynamo
    from torch.fx.experimental import _config as symbolic_shapes

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.suppress_errors = True
    symbolic_shapes.use_duck_shape = False  # otherwise a square picture compiles for squares only
    names = ("ResnetBlock2D", "Transformer2DModel")
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(dynamic=True)
