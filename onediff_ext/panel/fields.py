"""The table of everything a user can choose: panel, infotext, API, X/Y/Z and presets read it."""

from __future__ import annotations

from onediff_ext.core.deepcache_options import JSON_FORMS as DEEPCACHE_FORMS
from onediff_ext.core.deepcache_options import LEVELS as DEEPCACHE_LEVELS
from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.options import BACKENDS, PRECISIONS
from onediff_ext.panel.field import CHECKBOX, CHECKBOXES, COMBO, DROPDOWN, RADIO, TEXT, Field
from onediff_ext.panel.presets import PRESETS

DEEPCACHE = "deepcache"
FEATURES = frozenset({DEEPCACHE})
"""Features that a host may lack."""

VAE_CHOICES = ("compile", "ignore encoder", "ignore all")
COMPONENT_CHOICES = ("UNet", "VAE", "ControlNet")
DRAW_WITHOUT, STOP = "draw without OneDiff", "stop"
ON_FAILURE_CHOICES = ("as in the settings", DRAW_WITHOUT, STOP)


def _deepcache_label(value: object) -> str:
    return DeepCacheOptions.parse(value).label


def _guidance_text(value: object) -> str:
    return str(GuidanceOptions.parse(value))


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
        decided_by_preset=True,
    ),
    Field(
        "vae",
        RADIO,
        "VAE",
        "Leave out the encoder, or all of it, if another extension changes the VAE.",
        "compile",
        VAE_CHOICES,
        infotext="OneDiff VAE",
        decided_by_preset=True,
    ),
    Field(
        "sizes",
        TEXT,
        "Warm-up sizes",
        "Build now makes all graphs, and measures a step at each of these sizes.",
        "",
        placeholder="512x768, 1024x1024@2",
        format="sizes",
        is_for_pictures=False,
    ),
    Field(
        "backend",
        DROPDOWN,
        "Backend",
        "The compiler that builds the graphs.",
        BACKENDS[0],
        BACKENDS,
        infotext="OneDiff backend",
        decided_by_preset=True,
    ),
    Field(
        "captures",
        CHECKBOX,
        "CUDA graphs",
        "On a GPU, replay whole steps as CUDA graphs: most of the gain at small sizes.",
        True,
        infotext="OneDiff captures",
        decided_by_preset=True,
    ),
    Field(
        "size_box",
        TEXT,
        "Size box",
        "Smallest and largest picture that uses graphs; empty for every size.",
        "",
        infotext="OneDiff size box",
        placeholder="256x256 - 2048x2048",
        format="size-box",
    ),
    Field(
        "batch_range",
        TEXT,
        "Batch range",
        "Fewest and most pictures at once that use graphs; empty for all.",
        "",
        infotext="OneDiff batch range",
        placeholder="1 - 4",
        format="batch-range",
    ),
    Field(
        "on_failure",
        RADIO,
        "If graphs cannot be used",
        "Draw the picture without them, or stop and say why.",
        ON_FAILURE_CHOICES[0],
        ON_FAILURE_CHOICES,
        infotext="OneDiff on failure",
        is_for_pictures=False,
    ),
    Field(
        "precision",
        DROPDOWN,
        "Precision",
        "fp8 and int8 multiply in 8 bits, on GPUs that can: faster, and pictures change a little.",
        PRECISIONS[0],
        PRECISIONS,
        infotext="OneDiff precision",
        decided_by_preset=True,
    ),
    Field(
        "guidance_steps",
        COMBO,
        "Guidance steps",
        "CFG in a part of the steps: the others take half of the work, and pictures change."
        " A gate freezes cross-attention too. Or write one of your own, such as interval:0.1-0.7.",
        "off",
        ("off", "interval:0-0.8", "interval:0-0.6", "interval:0-0.4", "adaptive:0.991", "gate:0.4"),
        infotext="OneDiff guidance steps",
        decided_by_preset=True,
        normalize=_guidance_text,
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
        decided_by_preset=True,
        normalize=_deepcache_label,
        accepts=DEEPCACHE_FORMS,
        feature=DEEPCACHE,
    ),
)
"""The order of positional arguments in the API. New fields are added at the end of those without a
`feature`: fields that a host may lack come last."""

BY_NAME = {field.name: field for field in FIELDS}


def fields_for(features: frozenset[str]) -> tuple[Field, ...]:
    """The fields that a host with these features offers."""
    return tuple(field for field in FIELDS if not field.feature or field.feature in features)
