"""Guards a VAE while a picture is drawn: tiles when memory is short, a wider dtype on overflow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import PictureError
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.diffusers.checkpoints.weights_dtype import computes_in_bf16
from onediff_ext.hosts.diffusers.vae.vae_fallbacks import VaeFallbacks, VaeNote
from onediff_ext.hosts.diffusers.vae.vae_memory import DeviceMemory

logger = logging.getLogger(__name__)

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def wider_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to use when float16 overflows.

    bfloat16 where the device supports it, because it is as fast as float16; else float32.
    """
    return torch.bfloat16 if computes_in_bf16(device) else torch.float32


class GuardedVae:
    """Encodes and decodes for a pipeline, with tiles and a wider dtype where needed.

    diffusers runs a float16 VAE in float32 in SDXL's pipelines if its config says
    ``force_upcast``; SD1's and SD2's pipelines ignore that entry. This class works in any dtype:
    a call that overflows in float16 is repeated in a wider dtype, and that part of the VAE uses
    the wider dtype from then on. Weights have that dtype only during the call.

    Args:
        pipe: Its ``vae`` is used; its CUDA graphs may be dropped.
        tiling: See `VaeFallbacks`.
        overflowing: Parts ("encoder", "decoder") that are known to overflow in float16; newly
            found parts are added.
        memory: Memory of the device; None asks torch.

    Raises:
        OptionError: `tiling` is unknown.
    """

    def __init__(
        self,
        pipe: Any,
        tiling: str = "auto",
        overflowing: set[str] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._vae = pipe.vae
        self._overflowing = set[str]() if overflowing is None else overflowing
        self._fitting = VaeFallbacks(pipe.vae, memory or DeviceMemory(pipe), tiling)

    @contextmanager
    def drawing(self) -> Iterator[VaeRun]:
        """Guard the VAE while the pipeline draws one batch, within this ``with`` block."""
        run = VaeRun(self._vae, self._fitting, self._overflowing)
        with Patches() as patches:
            patches.set(self._vae, "encode", run.encode)
            patches.set(self._vae, "decode", run.decode)
            yield run


class VaeRun:
    """Replaces a VAE's ``encode`` and ``decode`` while one batch is drawn.

    Attributes:
        notes: Notes for the user, one for each kind.
    """

    def __init__(self, vae: Any, fitting: VaeFallbacks, overflowing: set[str]) -> None:
        self._vae, self._fitting, self._overflowing = vae, fitting, overflowing
        self._own_encode, self._own_decode = vae.encode, vae.decode
        self._encoded: list[torch.Tensor] = []
        self._errors: list[PictureError | None] = []
        self.notes: list[VaeNote] = []

    def error(self, index: int) -> PictureError | None:
        """Return why the picture of this index failed, or None."""
        return self._errors[index] if index < len(self._errors) else None

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """AutoencoderKL's `encode`: pictures [B, 3, H, W] → a distribution of latents."""

        def own(pictures: torch.Tensor) -> Any:
            return self._own_encode(pictures, return_dict=False)[0]

        posterior = self._run("encoder", own, x)
        # moments [B, 2C, H/8, W/8]; checking waits for the device, so check only float16
        if x.dtype == torch.float16 and not all(_finite(posterior.parameters)):
            posterior = self._run_wider("encoder", own, x)
        self._encoded.append(posterior.parameters.isfinite().all())
        if posterior.parameters.dtype != x.dtype:
            posterior = type(posterior)(posterior.parameters.to(x.dtype))
        if not return_dict:
            return (posterior,)
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        return AutoencoderKLOutput(latent_dist=posterior)

    def decode(self, z: torch.Tensor, return_dict: bool = True, **others: Any) -> Any:
        """AutoencoderKL's `decode`: latents [B, C, H/8, W/8] → pictures [B, 3, H, W]."""

        def own(latents: torch.Tensor) -> Any:
            return self._own_decode(latents, return_dict=False, **others)[0]

        pixels = self._run("decoder", own, z)
        good = _finite(pixels)  # the only wait of a batch; pixels are needed next anyway
        if not all(good):
            usable = _finite(z)
            again = [i for i, ok in enumerate(good) if usable[i] and not ok]
            if again and z.dtype == torch.float16:
                pixels[again] = self._run_wider("decoder", own, z[again]).to(pixels.dtype)
                good = _finite(pixels)
            self._errors = [
                None if ok else self._overflow_error(usable[i], z.dtype)
                for i, ok in enumerate(good)
            ]
        pixels = pixels.to(z.dtype)
        if not return_dict:
            return (pixels,)
        from diffusers.models.autoencoders.vae import DecoderOutput

        return DecoderOutput(sample=pixels)

    def _run(self, part: str, own: Any, given: torch.Tensor) -> Any:
        if given.dtype == torch.float16 and part in self._overflowing:
            return self._run_wider(part, own, given)
        return self._fitting.run(part, own, given, self._note)

    def _run_wider(self, part: str, own: Any, given: torch.Tensor) -> Any:
        dtype = wider_dtype(given.device)
        self._overflowing.add(part)
        done = part.removesuffix("r") + "d"
        self._note(VaeNote(f"VAE {done} in {_NAMES[dtype]}", "it overflows in fp16"))
        with _in_dtype(getattr(self._vae, part), dtype), _in_dtype(self._latent_conv(part), dtype):
            return self._fitting.run(part, own, given.to(dtype), self._note)

    def _latent_conv(self, part: str) -> nn.Module | None:
        """Return the convolution between a part and the latents."""
        name = "quant_conv" if part == "encoder" else "post_quant_conv"
        found: nn.Module | None = getattr(self._vae, name, None)
        return found

    def _overflow_error(self, has_latents: bool, dtype: torch.dtype) -> PictureError:
        name = _NAMES.get(dtype, str(dtype))
        if not all(bool(flag) for flag in self._encoded):
            return PictureError(
                f"The VAE overflowed (NaN) in {name} when it read the input picture.",
                "Use another VAE (--vae), or another checkpoint.",
            )
        if has_latents:
            return PictureError(
                f"The VAE overflowed (NaN) in {name}, so there is no picture.",
                "Use another VAE (--vae), or another checkpoint.",
            )
        hint = "Use --dtype bf16 or --dtype fp32."
        if dtype != torch.float16:
            hint = "Try another sampler or a lower guidance; if that does not help, the checkpoint"
            hint += " or a LoRA is damaged."
        return PictureError(
            f"The UNet or transformer overflowed (NaN) in {name}, so there is nothing to decode.",
            hint,
        )

    def _note(self, note: VaeNote) -> None:
        if note.what not in [known.what for known in self.notes]:
            self.notes.append(note)
            logger.info("%s", note)


def _finite(tensor: torch.Tensor) -> list[bool]:
    """Return for each item of a batch whether all its values are finite; waits for the device."""
    flags: list[bool] = tensor.isfinite().flatten(1).all(1).tolist()
    return flags


@contextmanager
def _in_dtype(module: nn.Module | None, dtype: torch.dtype) -> Iterator[None]:
    """Cast a model's weights within this ``with`` block; the original tensors return after it."""
    own = [] if module is None else [(p, p.data) for p in module.parameters()]
    try:
        for parameter, weight in own:
            parameter.data = weight.to(dtype)
        yield
    finally:
        for parameter, weight in own:
            parameter.data = weight
