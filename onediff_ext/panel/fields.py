"""The one table of what a user can choose: panel, infotext, API, X/Y/Z and presets read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onediff_ext.core.deepcache_options import PRESETS as DEEPCACHE_LEVELS
from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.options import BACKENDS, PRECISIONS

CUSTOM = "Custom"
PRESETS: dict[str, dict[str, object]] = {
    "Balanced": {},
    "Fast": {"deepcache": "light"},
    "Maximum": {"deepcache": "medium"},
    CUSTOM: {},
}
"""Preset → the values that differ from the fields' own defaults; Custom takes them as they are."""

DEEPCACHE = "deepcache"
FEATURES = frozenset({DEEPCACHE})
"""What not every host can do."""

VAE_CHOICES = ("compile", "ignore encoder", "ignore all")
COMPONENT_CHOICES = ("UNet", "VAE", "ControlNet")
DRAW_WITHOUT, STOP = "draw without OneDiff", "stop"
ON_FAILURE_CHOICES = ("as in the settings", DRAW_WITHOUT, STOP)

CHECKBOX, RADIO, CHECKBOXES, DROPDOWN, TEXT = "checkbox", "radio", "checkboxes", "dropdown", "text"
COMBO = "combobox"
"""A dropdown that takes a text of one's own as well."""


@dataclass(frozen=True)
class Field:
    """One choice.

    Args:
        name: Key in the API's dict and attribute of `Choices`.
        form: How it is shown: one of the constants above.
        label: For people; localisation files translate it.
        help: What it means, in one sentence.
        default: Its value when nobody says otherwise.
        choices: The values that it may have, if they are few.
        infotext: Name of its infotext entry; ``""`` when it has none.
        preset: Whether presets decide it.
        advanced: Whether it is in the closed part.
        placeholder: Example of a text.
        read: Makes the value's text of whatever a front end has, for a combobox.
        feature: Entry of `FEATURES` that a host must have for it; ``""`` for none.
    """

    name: str
    form: str
    label: str
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    infotext: str = ""
    preset: bool = False
    advanced: bool = False
    placeholder: str = ""
    read: Callable[[object], str] | None = None
    feature: str = ""


def _deepcache_label(value: object) -> str:
    return DeepCacheOptions.parse(value).label


ENABLED = Field(
    "enabled",
    CHECKBOX,
    "Enable OneDiff",
    "Draw with compiled graphs.",
    False,
    infotext="OneDiff",
)

FIELDS = (
    ENABLED,
    Field(
        "preset",
        RADIO,
        "Preset",
        "Balanced draws what the model draws; Fast and Maximum change pictures a little.",
        "Balanced",
        tuple(PRESETS),
        infotext="OneDiff preset",
    ),
    Field(
        "components",
        CHECKBOXES,
        "Components",
        "Which models run through graphs.",
        COMPONENT_CHOICES,
        COMPONENT_CHOICES,
        infotext="OneDiff components",
        preset=True,
    ),
    Field(
        "vae",
        RADIO,
        "VAE",
        "Leave out the encoder, or all of it, if another extension changes the VAE.",
        "compile",
        VAE_CHOICES,
        infotext="OneDiff VAE",
        preset=True,
    ),
    Field(
        "sizes",
        TEXT,
        "Warm-up sizes",
        "WIDTHxHEIGHT, and @BATCH for several pictures at once.",
        "",
        placeholder="512x768, 1024x1024@2",
    ),
    Field(
        "backend",
        DROPDOWN,
        "Backend",
        "Who makes the graphs.",
        BACKENDS[0],
        BACKENDS,
        infotext="OneDiff backend",
        preset=True,
        advanced=True,
    ),
    Field(
        "captures",
        CHECKBOX,
        "Captures",
        "On a GPU, replay whole steps as CUDA graphs: most of the gain at small sizes.",
        True,
        infotext="OneDiff captures",
        preset=True,
        advanced=True,
    ),
    Field(
        "size_box",
        TEXT,
        "Size box",
        "Smallest and largest picture that uses graphs; empty for every size.",
        "",
        infotext="OneDiff size box",
        advanced=True,
        placeholder="256x256 - 2048x2048",
    ),
    Field(
        "batch_range",
        TEXT,
        "Batch range",
        "Fewest and most pictures at once that use graphs; empty for all.",
        "",
        infotext="OneDiff batch range",
        advanced=True,
        placeholder="1 - 4",
    ),
    Field(
        "on_failure",
        RADIO,
        "If graphs cannot be used",
        "Draw the picture without them, or stop and say why.",
        ON_FAILURE_CHOICES[0],
        ON_FAILURE_CHOICES,
        infotext="OneDiff on failure",
        advanced=True,
    ),
    Field(
        "precision",
        DROPDOWN,
        "Precision",
        "fp8 and int8 multiply in 8 bits, on GPUs that can: faster, and pictures change a little.",
        PRECISIONS[0],
        PRECISIONS,
        infotext="OneDiff precision",
        preset=True,
        advanced=True,
    ),
    Field(
        "deepcache",
        COMBO,
        "DeepCache",
        "Reuses deep features between steps: small details change, more with each level."
        " Or write an interval of your own, such as 4.",
        "off",
        tuple(DEEPCACHE_LEVELS),
        infotext="OneDiff DeepCache",
        preset=True,
        read=_deepcache_label,
        feature=DEEPCACHE,
    ),
)
"""In the order of the panel, and of positional arguments in the API: new ones go to the end."""

BY_NAME = {field.name: field for field in FIELDS}


def fields_for(features: frozenset[str]) -> tuple[Field, ...]:
    """The fields that a host with these features has."""
    return tuple(field for field in FIELDS if not field.feature or field.feature in features)


def presets_for(features: frozenset[str]) -> tuple[str, ...]:
    """The presets that a host with these features can keep to."""
    has = {field.name for field in fields_for(features)}
    return tuple(name for name, values in PRESETS.items() if has.issuperset(values))


def preset_values(preset: str) -> dict[str, Any]:
    """What a preset sets, field by field; empty for Custom."""
    if preset == CUSTOM:
        return {}
    return {f.name: PRESETS[preset].get(f.name, f.default) for f in FIELDS if f.preset}
