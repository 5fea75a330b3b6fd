"""Generate pictures with a loaded checkpoint, timed: text to image and image to image."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from onediff_ext.core.deepcache_options import few_steps_reason
from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.compile import one_picture
from onediff_ext.hosts.diffusers.deepcache import deepcache_for
from onediff_ext.hosts.diffusers.deepcache_unet import distilled_reason
from onediff_ext.hosts.diffusers.denoiser import denoiser_of, takes_guidance
from onediff_ext.hosts.diffusers.drawing import transformer_calls
from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
from onediff_ext.hosts.diffusers.drawing.encoded_prompts import EncodedPrompts
from onediff_ext.hosts.diffusers.drawing.sampler_noise import noise_sent_ahead
from onediff_ext.hosts.diffusers.drawing.step_clock import StepClock
from onediff_ext.hosts.diffusers.drawing.tasks import pipeline_for
from onediff_ext.hosts.diffusers.drawing.transformer_calls import ReadPictures
from onediff_ext.hosts.diffusers.flow_schedulers import make_flow_scheduler
from onediff_ext.hosts.diffusers.guidance_steps import check_guidance_steps, guidance_steps_for
from onediff_ext.hosts.diffusers.schedulers import make_scheduler
from onediff_ext.hosts.diffusers.step_cache import step_cache_for
from onediff_ext.hosts.diffusers.vae.guarded_vae import GuardedVae
from onediff_ext.hosts.diffusers.vae.kept_casts import KeptCasts

if TYPE_CHECKING:
    from PIL import Image

    from onediff_ext.core.errors import PictureError
    from onediff_ext.hosts.diffusers.checkpoints.load import LoadedCheckpoint
    from onediff_ext.hosts.diffusers.vae.vae_fallbacks import VaeNote


@dataclass(frozen=True)
class Drawn:
    """The result of one batch.

    Args:
        images: RGB pictures in the order of the seeds; None where a model's values overflowed
            (NaN), which would be a black picture.
        seconds: Of the whole batch, from prompt to pixels.
        step_seconds: Of each sampling step except the first, whose start is not observed. A
            batch of one step has one entry, the time of the whole batch.
        uneven: Some steps do more work than others (DeepCache, guidance steps).
        errors: For each picture the reason why it is None, or None.
        notes: How the VAE ran, where the user should know, such as tiles for lack of memory.
    """

    images: list[Image.Image | None]
    seconds: float
    step_seconds: list[float] = field(default_factory=list)
    uneven: bool = False
    errors: list[PictureError | None] = field(default_factory=list)
    notes: list[VaeNote] = field(default_factory=list)

    def error(self, index: int) -> PictureError:
        """Return why the picture of this index is None."""
        error = self.errors[index]
        assert error is not None
        return error

    def cropped(self, width_px: int, height_px: int) -> Drawn:
        """Return the same with pictures cut to a size, from their upper left corner."""
        box = (0, 0, width_px, height_px)
        cut = [
            image if image is None or image.size == box[2:] else image.crop(box)
            for image in self.images
        ]
        return replace(self, images=cut)

    @property
    def seconds_per_step(self) -> float:
        """The median of the steps, or their mean if they are uneven."""
        if self.uneven:
            return sum(self.step_seconds) / len(self.step_seconds)
        return sorted(self.step_seconds)[len(self.step_seconds) // 2]


class ImageGenerator:
    """Generates pictures with one checkpoint. Its pipelines share all models.

    Args:
        checkpoint: From `load_checkpoint`.
        vae_tiling: Whether the VAE runs over tiles: "auto" (when a whole picture does not fit
            into memory), "on" or "off".
        overflowing: Parts of the VAE ("encoder", "decoder") that are known to overflow in
            float16; newly found parts are added.

    Raises:
        OptionError: `vae_tiling` is unknown.

    Attributes:
        on_step: Called with the number of each finished sampling step. An exception from it ends
            the drawing and reaches the caller.
    """

    def __init__(
        self,
        checkpoint: LoadedCheckpoint,
        vae_tiling: str = "auto",
        overflowing: set[str] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.pipe = checkpoint.pipeline
        self.vae = GuardedVae(self.pipe, vae_tiling, overflowing)
        self._transformer = checkpoint.transformer_model
        self._noise_config = dict(self.pipe.scheduler.config)
        self._pipes: dict[str, Any] = {}
        self._prompts: EncodedPrompts | None = None
        self.on_step: Callable[[int], None] = lambda _: None

    @property
    def device(self) -> torch.device:
        """The denoiser's device."""
        device: torch.device = next(denoiser_of(self.pipe).parameters()).device
        return device

    def check(self, settings: DrawSettings, task: str = "txt2img") -> None:
        """Raise OptionError when sampler, cache or guidance steps cannot be used.

        It is called before anything is built.
        """
        self._scheduler(settings)
        with deepcache_for(self.pipe, settings.deepcache):
            pass
        pipe = self.pipe if self._transformer is None else self._pipe(task)
        check_guidance_steps(pipe, settings.guidance_steps)
        if settings.step_cache.is_on:
            with step_cache_for(pipe, settings.step_cache, settings.steps):
                pass

    def deepcache_off_reason(self, settings: DrawSettings) -> str | None:
        """Return why pictures are drawn without the requested DeepCache, or None."""
        if not settings.deepcache.is_on:
            return None
        return distilled_reason(denoiser_of(self.pipe)) or few_steps_reason(
            settings.scheduler, settings.steps
        )

    def guidance_steps_off_reason(self, settings: DrawSettings) -> str | None:
        """Return why the requested guidance steps change nothing, or None."""
        if not settings.guidance_steps.is_on:
            return None
        if settings.guidance <= 1:
            return f"A CFG scale of {settings.guidance:g} has no guidance to leave out"
        if takes_guidance(denoiser_of(self.pipe)):
            return f"{self.checkpoint.name} takes guidance as an input, which cannot be left out"
        return None

    def check_txt2img(self) -> None:
        """Raise OptionError when the checkpoint needs an input picture."""
        if self.checkpoint.is_inpaint or self.checkpoint.architecture == "sdxl-refiner":
            raise OptionError(
                f"{self.checkpoint.name} cannot draw from text alone.",
                "Use img2img, or another checkpoint.",
            )

    def check_img2img(self) -> None:
        """Raise OptionError when diffusers draws this model from text only."""
        model = self._transformer
        if model is not None and "img2img" not in model.tasks:
            raise OptionError(
                f"diffusers has no image to image for {model.label}.",
                "Use txt2img, or another checkpoint.",
            )

    def ignored_text(self, settings: DrawSettings) -> list[str]:
        """Return a warning for each setting that is ignored, or cut as a long prompt is."""
        guidance = self.guidance_steps_off_reason(settings)
        warnings = [] if guidance is None else [f"{guidance}; guidance steps are ignored."]
        if self._transformer is not None:
            more = transformer_calls.ignored_text(self._transformer, self.pipe, settings)
            return [*warnings, *more]
        tokenizer = self.pipe.tokenizer or self.pipe.tokenizer_2
        refusal_reason = self.deepcache_off_reason(settings)
        if refusal_reason is not None:
            warnings.append(f"{refusal_reason}; drawn without.")
        for what, prompt in (
            ("prompt", settings.prompt),
            ("negative prompt", settings.negative_prompt),
        ):
            tokens = len(tokenizer(prompt).input_ids) - 2  # without start and end
            room = tokenizer.model_max_length - 2
            if tokens > room:
                warnings.append(
                    f"The {what} has {tokens} tokens; what comes after {room} is ignored."
                )
        return warnings

    def img2img(
        self,
        settings: DrawSettings,
        images: Any,
        seeds: Sequence[int],
        prompts: Sequence[str] | None = None,
    ) -> Drawn:
        """Draw from pictures of one size, both sides multiples of 8.

        Each picture's noise comes from its own seed, so the batch does not change it.

        Args:
            settings: Settings of all pictures.
            images: Pictures, or the result of `read`.
            seeds: One for each picture.
            prompts: One for each picture; None means the settings' prompt.

        Raises:
            OptionError: Steps times strength is less than one step.
        """
        settings.check_img2img_steps()
        self.check_img2img()
        if self._transformer is not None:
            given = images if isinstance(images, ReadPictures) else self.read(images)
            height, width = given.pixels.shape[-2:]
            inputs = {"image": given.pixels, "width": width, "height": height}
            inputs["strength"] = settings.strength
            drawn = self._draw(self._pipe("img2img"), settings, inputs, seeds, prompts)
            return drawn.cropped(*given.size_px)
        inputs = {"image": images, "strength": settings.strength}
        if self.checkpoint.is_inpaint:
            from PIL import Image

            width, height = images[0].size
            everything = Image.new("L", (width, height), 255)
            inputs |= {"mask_image": [everything] * len(images), "width": width, "height": height}
            return self._draw(self._pipe("inpaint"), settings, inputs, seeds, prompts)
        return self._draw(self._pipe("img2img"), settings, inputs, seeds, prompts)

    def read(self, images: Sequence[Image.Image]) -> Any:
        """Preprocess pictures for `img2img`; another thread may do this for the next batch."""
        if self.checkpoint.is_inpaint:
            return list(images)
        self.check_img2img()
        if self._transformer is not None:
            pixels = self._pipe("img2img").image_processor.preprocess(
                [transformer_calls.padded(image) for image in images]
            )
            return ReadPictures(pixels, images[0].size)
        return self._pipe("img2img").image_processor.preprocess(list(images))

    def txt2img(
        self, settings: DrawSettings, width_px: int, height_px: int, seeds: Sequence[int]
    ) -> Drawn:
        """Draw pictures of one size, both sides multiples of 8, one for each seed.

        Raises:
            OptionError: The checkpoint needs an input picture (inpainting, refiner).
        """
        self.check_txt2img()
        inputs = {"width": width_px, "height": height_px}
        if self._transformer is not None:
            width, height = transformer_calls.drawn_size(width_px, height_px)
            inputs = {"width": width, "height": height}
        drawn = self._draw(self._pipe("txt2img"), settings, inputs, seeds)
        return drawn.cropped(width_px, height_px)

    def _draw(
        self,
        pipe: Any,
        settings: DrawSettings,
        inputs: dict[str, Any],
        seeds: Sequence[int],
        prompts: Sequence[str] | None = None,
    ) -> Drawn:
        pipe.scheduler = self._scheduler(settings)
        # On the CPU, so a seed gives the same picture on every device.
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        clock = StepClock(self.device, self.on_step)
        start = time.perf_counter()
        deepcache = deepcache_for(pipe, settings.deepcache)
        steps_run = int(settings.steps * inputs.get("strength", 1))
        step_cache = step_cache_for(pipe, settings.step_cache, steps_run)
        guided = guidance_steps_for(pipe, settings.guidance_steps)
        prompts_kept = nullcontext() if self._prompts is None else self._prompts.kept(pipe)
        noise = noise_sent_ahead(pipe.scheduler)
        with (
            one_picture(self.pipe),
            deepcache,
            step_cache,
            guided,
            prompts_kept,
            noise,
            self.vae.drawing() as vae,
        ):
            result = pipe(
                **self._texts(settings, list(prompts or [settings.prompt] * len(seeds))),
                num_inference_steps=settings.steps,
                generator=generators,
                callback_on_step_end=clock,
                output_type="pt",
                **inputs,
            )
        errors = [vae.error(index) for index in range(len(seeds))]
        images = [
            picture if error is None else None
            for picture, error in zip(_pictures(result.images), errors, strict=True)
        ]
        seconds = time.perf_counter() - start
        steps = clock.seconds()
        return Drawn(
            images,
            seconds,
            steps or [seconds],
            any(
                x.is_on for x in (settings.deepcache, settings.step_cache, settings.guidance_steps)
            ),
            errors,
            vae.notes,
        )

    def _scheduler(self, settings: DrawSettings) -> Any:
        make = make_scheduler if self._transformer is None else make_flow_scheduler
        return make(settings.scheduler, self._noise_config)

    def _texts(self, settings: DrawSettings, prompts: list[str]) -> dict[str, Any]:
        """Return the pipeline's arguments for prompts and guidance."""
        if self._transformer is not None:
            return transformer_calls.call_arguments(self._transformer, self.pipe, settings, prompts)
        return {
            "prompt": prompts,
            "negative_prompt": [settings.negative_prompt] * len(prompts),
            "guidance_scale": settings.guidance,
        }

    @contextmanager
    def one_job(self) -> Iterator[None]:
        """Cache encoded prompts and the VAE's float32 weights within this ``with`` block.

        The models must not change meanwhile.
        """
        self._prompts = EncodedPrompts()
        try:
            with KeptCasts(self.pipe.vae).kept():
                yield
        finally:
            self._prompts = None

    def _pipe(self, task: str) -> Any:
        if task not in self._pipes:
            self._pipes[task] = pipeline_for(task, self.pipe, self.checkpoint)
        return self._pipes[task]


def _pictures(pixels: torch.Tensor) -> list[Image.Image]:
    """Convert pixels [B, 3, H, W] from 0 to 1 into pictures.

    Rounding happens on the pixels' device, so only a quarter of the bytes are copied.
    """
    from PIL import Image

    levels = (pixels.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    return [Image.fromarray(picture) for picture in levels.contiguous().cpu().numpy()]
