"""One feature of diffusers' pipelines, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support import models, transformer_models

Options = Mapping[str, Any]
# Switches a feature on. Returns further arguments of the pipeline's call.
Prepare = Callable[[Any], Options | None]


def small_sd15(seed: int = 0) -> Any:
    """Return an SD1.5 pipeline with two narrow levels."""
    return models.sd15(seed, widths=(32, 64), attention=(True, False))


def one_width_sd15(seed: int = 0) -> Any:
    """Return an SD1.5 pipeline whose blocks are of few kinds, for features that make new kinds."""
    pipe = models.sd15(seed, widths=(32, 32), attention=(True, False))
    pipe.register_modules(vae=models.vae((32,) * 4, seed=seed))
    return pipe


def small_sdxl(seed: int = 0) -> Any:
    """Return an SDXL pipeline with two narrow levels."""
    return models.sdxl(seed, widths=(32, 64), attention=(False, True), heads=(1, 2), depths=(1, 2))


def small_sd3(seed: int = 0) -> Any:
    """Return an SD3.5 pipeline, whose calls take embeddings."""
    return transformer_models.sd3(seed)


def small_flux(seed: int = 0) -> Any:
    """Return a Flux.1 pipeline, whose calls take embeddings."""
    return transformer_models.flux(seed)


@dataclass(frozen=True)
class Feature:
    """One feature.

    Args:
        group: The table's section.
        name: The user's call or a few words, in Markdown.
        prepare: Switches it on in a pipeline that is compiled already.
        make: Builds the pipeline.
        options: Further arguments of every call.
        tolerance: Largest norm(x - y) / norm(y) between the picture and eager's.
    """

    group: str
    name: str
    prepare: Prepare
    make: Callable[[int], Any] = small_sd15
    options: Options = field(default_factory=dict)
    tolerance: float = 1e-4


FEATURES: list[Feature] = []


def feature(group: str, name: str, **settings: Any) -> Callable[[Prepare], Prepare]:
    """Register a function as `Feature.prepare`; `settings` are further fields of the feature."""

    def register(prepare: Prepare) -> Prepare:
        FEATURES.append(Feature(group, name, prepare, **settings))
        return prepare

    return register


def plain(group: str, name: str, **settings: Any) -> None:
    """Register a feature that needs nothing but a pipeline or arguments of its own."""
    FEATURES.append(Feature(group, name, lambda _pipe: None, **settings))
