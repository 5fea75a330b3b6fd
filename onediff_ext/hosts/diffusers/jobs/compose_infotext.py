"""The infotext of a result of the diffusers host: which fields it has, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onediff_ext import __version__
from onediff_ext.hosts.diffusers.schedulers import infotext_names
from onediff_ext.pictures.infotext_format import build_infotext

if TYPE_CHECKING:
    from onediff_ext.hosts.diffusers.drawing.draw_settings import DrawSettings
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator


def compose_infotext(
    image_generator: ImageGenerator,
    settings: DrawSettings,
    seed: int,
    size_px: tuple[int, int],
    extra: dict[str, object],
) -> str:
    """Compose the WebUI's `parameters` text of one result.

    Args:
        image_generator: Drew it.
        settings: With the image's own prompt.
        seed: Of the image.
        size_px: (width, height) of the result.
        extra: Further fields, placed before the version.
    """
    sampler, schedule = infotext_names(settings.scheduler)
    with_deepcache = (
        settings.deepcache.is_on and image_generator.deepcache_off_reason(settings) is None
    )
    guided = settings.guidance_steps
    with_guided = guided.is_on and image_generator.guidance_steps_off_reason(settings) is None
    width_px, height_px = size_px
    fields: dict[str, object] = {
        "Steps": settings.steps,
        "Sampler": sampler,
        "Schedule type": schedule,
        **_guidance(image_generator, settings),
        "Seed": seed,
        "Size": f"{width_px}x{height_px}",
        "Model": image_generator.checkpoint.name,
        "OneDiff DeepCache": settings.deepcache.label if with_deepcache else None,
        "OneDiff step cache": str(settings.step_cache) if settings.step_cache.is_on else None,
        "OneDiff guidance steps": str(guided) if with_guided else None,
        **extra,
        "Version": f"onediff-ext {__version__}",
    }
    return build_infotext(settings.prompt, settings.negative_prompt, fields)


def _guidance(image_generator: ImageGenerator, settings: DrawSettings) -> dict[str, object]:
    """Return the guidance under Forge's names; a distilled model takes it as an input."""
    model = image_generator.checkpoint.transformer_model
    if model is not None and model.is_distilled:
        return {"CFG scale": 1, "Distilled CFG Scale": settings.guidance}
    return {"CFG scale": settings.guidance}


def lora_field(identity: dict[str, object]) -> dict[str, object]:
    """Return a run's LoRAs as an infotext field; empty without LoRAs."""
    loras = identity.get("loras")
    return {"Lora": ", ".join(map(str, loras))} if isinstance(loras, list) and loras else {}
