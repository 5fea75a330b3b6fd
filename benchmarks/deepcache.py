"""Seconds for each picture with and without DeepCache, at full width with random weights.

    python -m benchmarks.deepcache --model sdxl --json FILE

One picture is 50 steps with CFG, from noise to pixels (no text encoder). The blocks are compiled;
on a GPU, forwards are also recorded as CUDA graphs. For each setting: seconds for a picture
(median of `--pictures`), speed-up over no DeepCache, full and shallow calls, memory of the cached
feature, and peak memory of a picture. Parity compares the compiled run with eager at the same
setting. The difference to a picture without DeepCache is recorded too, but with random weights it
says nothing about real models. Rows of the contender "plain" are a user's own calls: DeepCache is
enabled once, and nothing says where a picture begins or ends. ``--tiny`` tests the script on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.fingerprint import fingerprint
from benchmarks.results import measure_and_write
from benchmarks.timing import synchronize
from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.options import BACKENDS, CompileOptions
from onediff_ext.engine.checking.compare_with_eager import compare
from onediff_ext.hosts.diffusers.checkpoints.architectures import read_architecture
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, new_session
from onediff_ext.hosts.diffusers.deepcache import (
    deepcache_for,
    deepcache_state,
    disable_deepcache,
    enable_deepcache,
)
from onediff_ext.hosts.diffusers.jobs.run_report import recompile_count
from onediff_ext.hosts.diffusers.jobs.step_bench import paused
from onediff_ext.hosts.diffusers.probe import probe, unet_inputs

SETTINGS = ("off", "2", "3", "5", "3 depth=1", "3 depth=2", "5 depth=2")
SIZES = {"sd15": (512, 512), "sdxl": (1024, 1024)}
ARCHITECTURES = {"sd15": "sd1", "sdxl": "sdxl"}
TINY: dict[str, dict[str, Any]] = {
    "sd15": {"block_out_channels": (32, 32, 64, 64), "cross_attention_dim": 64},
    "sdxl": {
        "block_out_channels": (32, 64, 64),
        "attention_head_dim": (1, 2, 2),
        "transformer_layers_per_block": (1, 1, 1),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SIZES), default="sdxl")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pictures", type=int, default=5, help="timed pictures of each setting")
    parser.add_argument("--size", help="such as 960x720; default: 512x512, SDXL 1024x1024")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="DeepCache settings")
    parser.add_argument("--backend", choices=BACKENDS, default="inductor")
    parser.add_argument("--store", type=Path, help="graphs of an earlier run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="narrow layers, 96x80, 12 steps")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.size, arguments.steps = arguments.size or "96x80", min(arguments.steps, 12)
    measure_and_write(arguments, measure)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all settings in turn, so that a slow moment affects all of them."""
    device = torch.device(arguments.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    given = tuple(int(side) for side in arguments.size.split("x")) if arguments.size else None
    width, height = given or SIZES[arguments.model]
    models = make_models(arguments.model, device, dtype, tiny=arguments.tiny)
    picture = Picture(models, width, height, arguments.steps, device)
    session = new_session(CompileOptions(backend=arguments.backend, store=arguments.store))
    start = time.perf_counter()
    compile_pipe(models, session=session)
    probe(models)
    probe(models)
    ready_s = time.perf_counter() - start
    chosen = [DeepCacheOptions.parse(text) for text in arguments.settings]
    rows = [warm_up(picture, options) for options in chosen]
    recompiles = recompile_count()
    seconds: list[list[float]] = [[] for _ in chosen]
    for _ in range(arguments.pictures):
        for options, row, times in zip(chosen, rows, seconds, strict=True):
            times.append(timed(picture, options, row))
    without = next(
        (statistics.median(t) for o, t in zip(chosen, seconds, strict=True) if not o.is_on), None
    )
    for row, times in zip(rows, seconds, strict=True):
        row["picture_s"], row["slowest_s"] = statistics.median(times), max(times)
        row["speedup"] = None if without is None else without / row["picture_s"]
    rows += [plain_row(picture, options, arguments.pictures, without) for options in chosen]
    return {
        "what": "deepcache",
        "model": arguments.model,
        "tiny": arguments.tiny,
        "width": width,
        "height": height,
        "steps": arguments.steps,
        "backend": arguments.backend,
        "dtype": str(dtype).removeprefix("torch."),
        "fingerprint": fingerprint(device),
        "ready_s": ready_s,
        "captures": len(session.cuda_graphs),
        "captures_dropped": list(session.cuda_graphs.dropped),
        "not_captured_because": captured_reason(models),
        "recompiles": recompile_count() - recompiles,
        "states": sorted({kind.state.value for kind in session.kinds}),
        "fallbacks": [vars(f) for f in session.fallbacks()],
        "rows": rows,
    }


def make_models(model: str, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Any:
    """Return UNet and VAE with random weights, in a form that `compile_pipe` accepts."""
    from diffusers import AutoencoderKL, UNet2DConditionModel

    architecture = read_architecture(ARCHITECTURES[model])
    unet, vae = dict(architecture.unet), dict(architecture.vae)
    if tiny:
        unet |= TINY[model]
        vae |= {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
    torch.manual_seed(0)
    # SDXL's real VAE overflows in float16; bfloat16 is as fast.
    vae_dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    made: list[Any] = []
    plans: list[tuple[Any, dict[str, Any], torch.dtype]] = [
        (UNet2DConditionModel, unet, dtype),
        (AutoencoderKL, vae, vae_dtype),
    ]
    for cls, config, kind in plans:
        torch.set_default_dtype(kind)
        try:
            with torch.device(device):
                made.append(cls.from_config(config).eval().requires_grad_(False))
        finally:
            torch.set_default_dtype(torch.float32)
    return SimpleNamespace(unet=made[0], vae=made[1], scheduler=None)


class Picture:
    """A sampler's work: Euler steps with CFG, then the VAE's decoder."""

    def __init__(
        self, models: Any, width: int, height: int, steps: int, device: torch.device
    ) -> None:
        from diffusers import EulerDiscreteScheduler

        self.models, self.device, self._steps = models, device, steps
        self.scheduler: Any = EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1
        )
        models.scheduler = self.scheduler
        generator = torch.Generator().manual_seed(1)
        inputs = unet_inputs(
            models.unet, generator, height_latent=height // 8, width_latent=width // 8
        )
        self._noise = inputs.pop("sample")[:1]
        inputs.pop("timestep")
        self._inputs = inputs

    def draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents [1, 4, H/8, W/8] and pixels [1, 3, H, W]."""
        scheduler, unet, vae = self.scheduler, self.models.unet, self.models.vae
        with torch.no_grad():
            scheduler.set_timesteps(self._steps, device=self.device)
            latents = self._noise * scheduler.init_noise_sigma
            for timestep in scheduler.timesteps:
                both = scheduler.scale_model_input(torch.cat([latents] * 2), timestep)
                negative, prompt = unet(both, timestep, **self._inputs).sample.chunk(2)
                guided = negative + 7 * (prompt - negative)
                latents = scheduler.step(guided, timestep, latents).prev_sample
            scaled = latents.to(next(vae.parameters()).dtype) / vae.config.scaling_factor
            return latents, vae.decode(scaled).sample


def warm_up(picture: Picture, options: DeepCacheOptions) -> dict[str, Any]:
    """Draw with a setting until nothing more is built, compared or captured; return its row."""
    compiled = compiled_state(picture.models)
    assert compiled is not None
    with deepcache_for(picture.models, options):
        start = time.perf_counter()
        latents, _ = picture.draw()
        synchronize(picture.device)
        first_s = time.perf_counter() - start
        cache = deepcache_state(picture.models)
        counts = {} if cache is None else dict(cache.counts)
        picture.draw()
        latents, _ = picture.draw()
        with paused(compiled):
            expected, _ = picture.draw()
    with deepcache_for(picture.models, DeepCacheOptions(1)):
        without, _ = picture.draw()
    return {
        "contender": "ours-exact",
        "setting": str(options) if options.is_on else "off",
        "counts": counts,
        "first_s": first_s,
        "error": compare(latents, expected).error,
        "difference_from_off": compare(latents, without).error,
        "feature_bytes": 0,
        "peak_bytes": 0,
    }


def timed(picture: Picture, options: DeepCacheOptions, row: dict[str, Any]) -> float:
    """Draw one picture and return its seconds."""
    device = picture.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with deepcache_for(picture.models, options):
        synchronize(device)
        start = time.perf_counter()
        picture.draw()
        synchronize(device)
        seconds = time.perf_counter() - start
        cache = deepcache_state(picture.models)
        if cache is not None and options.is_on:
            row["feature_bytes"] = max(row["feature_bytes"], cache.peak_bytes)
    if device.type == "cuda":
        row["peak_bytes"] = max(row["peak_bytes"], torch.cuda.max_memory_allocated(device))
    return seconds


def plain_row(
    picture: Picture, options: DeepCacheOptions, pictures: int, without_s: float | None
) -> dict[str, Any]:
    """Draw with a setting as a user does, and return its row.

    Args:
        picture: What is drawn.
        options: The setting.
        pictures: How many are timed.
        without_s: Seconds of a picture without DeepCache.
    """
    if options.is_on:
        enable_deepcache(picture.models, options)
    seconds = []
    for _ in range(pictures + 1):  # the first one is not counted
        start = time.perf_counter()
        picture.draw()
        synchronize(picture.device)
        seconds.append(time.perf_counter() - start)
    disable_deepcache(picture.models)
    picture_s = statistics.median(seconds[1:])
    return {
        "contender": "plain",
        "setting": str(options) if options.is_on else "off",
        "picture_s": picture_s,
        "slowest_s": max(seconds[1:]),
        "speedup": None if without_s is None else without_s / picture_s,
    }


def captured_reason(models: Any) -> str:
    """Return why the UNet's last forward was not replayed from a CUDA graph, or ""."""
    compiled = compiled_state(models)
    captured = compiled.components[0].captured if compiled is not None else None
    return "" if captured is None else captured.reason


if __name__ == "__main__":
    sys.exit(main())
