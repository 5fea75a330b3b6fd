"""Draw pictures with a loaded checkpoint: text to image and image to image, timed."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions, few_steps_refusal
from onediff_ext.core.errors import OptionError
from onediff_ext.hosts.diffusers.compile import one_picture
from onediff_ext.hosts.diffusers.deepcache import deepcache_for, distilled_refusal
from onediff_ext.hosts.diffusers.drawing.encoded_prompts import EncodedPrompts
from onediff_ext.hosts.diffusers.drawing.sampler_noise import noise_sent_ahead
from onediff_ext.hosts.diffusers.schedulers import infotext_names, make_scheduler
from onediff_ext.hosts.diffusers.vae.guarded_vae import GuardedVae
from onediff_ext.hosts.diffusers.vae.kept_casts import KeptCasts

if TYPE_CHECKING:
    from PIL import Image

    from onediff_ext.core.errors import PictureError
    from onediff_ext.hosts.diffusers.checkpoints.load import LoadedCheckpoint
    from onediff_ext.hosts.diffusers.vae.vae_fallbacks import VaeNote

_TASKS = {"txt2img": "", "img2img": "Img2Img", "inpaint": "Inpaint"}  # in diffusers' class names


@dataclass(frozen=True)
class DrawSettings:
    """What decides a picture, besides its size, its seed and the picture it starts from.

    Args:
        prompt, negative_prompt: As in the WebUI; cut at 75 tokens.
        steps: Sampling steps; image to image runs ``steps * strength`` of them.
        guidance: CFG scale; 1 or less draws without CFG.
        strength: Denoising strength of image to image, above 0 and up to 1.
        scheduler: A sampler's name, such as "Euler a" or "DPM++ 2M Karras".
        deepcache: How much of the UNet's work is reused between steps.

    Raises:
        OptionError: A value cannot be used.
    """

    prompt: str = ""
    negative_prompt: str = ""
    steps: int = 20
    guidance: float = 7.0
    strength: float = 0.6
    scheduler: str = "Euler a"
    deepcache: DeepCacheOptions = OFF

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1000:
            raise OptionError(f"{self.steps} steps cannot be drawn.", "Choose 1 to 1000.")
        if not 0 < self.strength <= 1:
            raise OptionError(
                f"A strength of {self.strength} cannot be used.", "Choose above 0 and up to 1."
            )
        if not 0 <= self.guidance <= 100:
            raise OptionError(f"A guidance of {self.guidance} cannot be used.", "Choose 1 to 30.")
        infotext_names(self.scheduler)

    def check_img2img_steps(self) -> None:
        """Raise OptionError when strength leaves image to image without a single step."""
        if int(self.steps * self.strength) < 1:
            enough = next(n for n in itertools.count(self.steps) if int(n * self.strength) >= 1)
            raise OptionError(
                f"{self.steps} steps at strength {self.strength} are less than one step.",
                f"Use at least {enough} steps, or a higher strength.",
            )


@dataclass(frozen=True)
class Drawn:
    """The result of one batch.

    Args:
        images: RGB pictures in the order of the seeds; None where a model's numbers ran over
            (NaN), which would have been a black picture.
        seconds: Of the whole batch, from prompt to pixels.
        step_seconds: Of each sampling step but the first, whose start is not seen; all of a
            batch of one step is its only entry.
        uneven: Some steps do more than others (DeepCache).
        errors: For each picture why there is none, or None.
        notes: What is worth knowing of how the VAE ran, such as tiles for lack of memory.
    """

    images: list[Image.Image | None]
    seconds: float
    step_seconds: list[float] = field(default_factory=list)
    uneven: bool = False
    errors: list[PictureError | None] = field(default_factory=list)
    notes: list[VaeNote] = field(default_factory=list)

    def error(self, index: int) -> PictureError:
        """Why the picture of this index is None."""
        error = self.errors[index]
        assert error is not None
        return error

    @property
    def seconds_per_step(self) -> float:
        """Median over the steps; their mean where they are uneven."""
        if self.uneven:
            return sum(self.step_seconds) / len(self.step_seconds)
        return sorted(self.step_seconds)[len(self.step_seconds) // 2]


class _StepClock:
    """Times each sampling step, and keeps one step in hand.

    It waits for the step before the one that has just been handed to the device: this one is at
    work while Python prepares the next, and whoever cancels is heard a step later at most.
    """

    def __init__(self, device: torch.device, on_step: Callable[[int], None]) -> None:
        self._device, self._on_step = device, on_step
        self._ends: list[Any] = []

    def __call__(self, *call: Any) -> dict[str, Any]:
        # diffusers calls it with (pipe, step, timestep, kwargs) and takes kwargs back.
        self._ends.append(self._now())
        if self._device.type == "cuda" and len(self._ends) > 1:
            self._ends[-2].synchronize()
        self._on_step(len(self._ends))
        kwargs: dict[str, Any] = call[-1]
        return kwargs

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        make_event: Any = torch.cuda.Event  # not typed
        event = make_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self) -> list[float]:
        """Of each step but the first, whose start is not seen; the last has to be done."""
        pairs = itertools.pairwise(self._ends)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


class ImageGenerator:
    """Draws with one checkpoint. Its pipelines share all models.

    Args:
        checkpoint: From `load_checkpoint`.
        vae_tiling: Whether the VAE runs over tiles: "auto" (when a picture would not fit into
            memory otherwise), "on" or "off".
        overflowing: Parts of the VAE ("encoder", "decoder") that run over in float16, as far as
            that was seen before; what is found out is added.

    Raises:
        OptionError: `vae_tiling` is unknown.

    Attributes:
        on_step: Called with the number of each finished sampling step; what it raises ends the
            drawing and reaches the caller.
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
        self._noise_config = dict(self.pipe.scheduler.config)
        self._pipes: dict[str, Any] = {}
        self._prompts: EncodedPrompts | None = None
        self.on_step: Callable[[int], None] = lambda _: None

    @property
    def device(self) -> torch.device:
        """Where the UNet is."""
        device: torch.device = next(self.pipe.unet.parameters()).device
        return device

    def check(self, settings: DrawSettings) -> None:
        """Raise OptionError when sampler or DeepCache cannot be used: before anything is built."""
        make_scheduler(settings.scheduler, self._noise_config)
        with deepcache_for(self.pipe, settings.deepcache):
            pass

    def deepcache_refusal(self, settings: DrawSettings) -> str | None:
        """Why pictures are drawn without the DeepCache that was asked for, or None."""
        if not settings.deepcache.is_on:
            return None
        return distilled_refusal(self.pipe.unet) or few_steps_refusal(
            settings.scheduler, settings.steps
        )

    def check_txt2img(self) -> None:
        """Raise OptionError when the checkpoint cannot draw without a picture."""
        if self.checkpoint.is_inpaint or self.checkpoint.architecture == "sdxl-refiner":
            raise OptionError(
                f"{self.checkpoint.name} cannot draw from text alone.",
                "Use img2img, or another checkpoint.",
            )

    def ignored_text(self, settings: DrawSettings) -> list[str]:
        """A warning for each setting that is left out, wholly or, as a long prompt, in part."""
        tokenizer = self.pipe.tokenizer or self.pipe.tokenizer_2
        refusal_reason = self.deepcache_refusal(settings)
        warnings = [] if refusal_reason is None else [f"{refusal_reason}; drawn without."]
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

        Args:
            settings: What to draw.
            images: Pictures, or what `read` has made of them.
            seeds: One for each.
            prompts: Each picture's own; None for the settings' one.

        Each picture's noise comes from its own seed, so that the batch it is in
        does not matter.

        Raises:
            OptionError: Strength and steps leave nothing to draw.
        """
        settings.check_img2img_steps()
        inputs = {"image": images, "strength": settings.strength}
        if self.checkpoint.is_inpaint:
            from PIL import Image

            width, height = images[0].size
            everything = Image.new("L", (width, height), 255)
            inputs |= {"mask_image": [everything] * len(images), "width": width, "height": height}
            return self._draw(self._pipe("inpaint"), settings, inputs, seeds, prompts)
        return self._draw(self._pipe("img2img"), settings, inputs, seeds, prompts)

    def read(self, images: Sequence[Image.Image]) -> Any:
        """What `img2img` takes: it may be made of the next pictures while these are drawn."""
        if self.checkpoint.is_inpaint:
            return list(images)
        return self._pipe("img2img").image_processor.preprocess(list(images))

    def txt2img(
        self, settings: DrawSettings, width_px: int, height_px: int, seeds: Sequence[int]
    ) -> Drawn:
        """Draw pictures of one size, both sides multiples of 8, one for each seed.

        Raises:
            OptionError: The checkpoint cannot draw without a picture (inpainting, refiner).
        """
        self.check_txt2img()
        inputs = {"width": width_px, "height": height_px}
        return self._draw(self._pipe("txt2img"), settings, inputs, seeds)

    def _draw(
        self,
        pipe: Any,
        settings: DrawSettings,
        inputs: dict[str, Any],
        seeds: Sequence[int],
        prompts: Sequence[str] | None = None,
    ) -> Drawn:
        pipe.scheduler = make_scheduler(settings.scheduler, self._noise_config)
        # From the CPU: one seed is one picture on every device.
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        clock = _StepClock(self.device, self.on_step)
        start = time.perf_counter()
        deepcache = deepcache_for(pipe, settings.deepcache)
        prompts_kept = nullcontext() if self._prompts is None else self._prompts.kept(pipe)
        noise = noise_sent_ahead(pipe.scheduler)
        with one_picture(self.pipe), deepcache, prompts_kept, noise, self.vae.drawing() as vae:
            result = pipe(
                prompt=list(prompts or [settings.prompt] * len(seeds)),
                negative_prompt=[settings.negative_prompt] * len(seeds),
                num_inference_steps=settings.steps,
                guidance_scale=settings.guidance,
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
            images, seconds, steps or [seconds], settings.deepcache.is_on, errors, vae.notes
        )

    @contextmanager
    def one_job(self) -> Iterator[None]:
        """Within this ``with`` block the models stay what they are: what text encoders make of a
        prompt is kept for the next picture, and so are the VAE's weights in float32."""
        self._prompts = EncodedPrompts()
        try:
            with KeptCasts(self.pipe.vae).kept():
                yield
        finally:
            self._prompts = None

    def _pipe(self, task: str) -> Any:
        if task not in self._pipes:
            made = _pipeline_for(task, self.pipe, self.checkpoint.architecture)
            made.set_progress_bar_config(disable=True)
            if task == "img2img":
                _take_what_is_read(made.image_processor)
            self._pipes[task] = made
        return self._pipes[task]


def _pictures(pixels: torch.Tensor) -> list[Image.Image]:
    """Pixels [B, 3, H, W] from 0 to 1 as pictures; rounded where they are, so that a quarter of the
    bytes are copied."""
    from PIL import Image

    levels = (pixels.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    return [Image.fromarray(picture) for picture in levels.contiguous().cpu().numpy()]


def _take_what_is_read(image_processor: Any) -> None:
    """Have diffusers' `VaeImageProcessor` leave alone what it has made of pictures before."""
    own = image_processor.preprocess

    def preprocess(images: Any) -> torch.Tensor:
        if isinstance(images, torch.Tensor):
            return images
        pixels: torch.Tensor = own(list(images))
        return pixels

    image_processor.preprocess = preprocess


class _OnOneDevice:
    """A pipeline whose models all lie where its UNet does.

    diffusers looks through all modules of all models for one that is offloaded, before each
    picture.
    """

    unet: Any

    @property
    def _execution_device(self) -> Any:
        return next(self.unet.parameters()).device


def _pipeline_for(task: str, pipe: Any, architecture: str) -> Any:
    """A pipeline of the same models for another task.

    diffusers' AutoPipelines do this for all architectures that it has, and import them all.
    """
    import diffusers

    name = "StableDiffusionXL" if architecture.startswith("sdxl") else "StableDiffusion"
    cls = getattr(diffusers, f"{name}{_TASKS[task]}Pipeline")
    known = {**pipe.config, **pipe.components, "add_watermarker": False}
    accepted = inspect.signature(cls.__init__).parameters
    made = type(cls.__name__, (_OnOneDevice, cls), {})
    return made(**{key: known[key] for key in accepted if key in known})
