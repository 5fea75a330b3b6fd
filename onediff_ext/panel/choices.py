"""The checked choices of a user: the same for panel, API, X/Y/Z and infotext."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.core.guidance_options import GuidanceOptions
from onediff_ext.core.json_schema import check_names
from onediff_ext.core.options import CompileOptions, parse_ignores, precision_changes
from onediff_ext.core.shapes import BatchShape, parse_sizes
from onediff_ext.panel.control_values import from_control
from onediff_ext.panel.field_values import checked
from onediff_ext.panel.fields import BY_NAME, FIELDS
from onediff_ext.panel.presets import CUSTOM, preset_values
from onediff_ext.panel.size_limits import batch_range_reason, size_box_reason


@dataclass(frozen=True)
class Choices:
    """One value for each entry of `fields.FIELDS`, under the same name."""

    enabled: bool = False
    preset: str = "Balanced"
    components: tuple[str, ...] = ("UNet", "VAE", "ControlNet")
    vae: str = "compile"
    sizes: str = ""
    backend: str = "inductor"
    captures: bool = True
    size_box: str = ""
    batch_range: str = ""
    on_failure: str = "as in the settings"
    precision: str = "exact"
    guidance_steps: str = "off"
    deepcache: str = "off"

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None = None) -> Choices:
        """Read a mapping. Missing names, and those with None, get their defaults.

        A preset other than Custom overrides the fields that presets decide.

        Raises:
            OptionError: A name is unknown, or a value cannot be used. The message names it and the
                hint says what can.
        """
        values = values or {}
        check_names(values, BY_NAME, "choice")
        given = {name: value for name, value in values.items() if value is not None}
        known = {name: checked(BY_NAME[name], value) for name, value in given.items()}
        chosen = {field.name: known.get(field.name, field.default) for field in FIELDS}
        chosen |= preset_values(chosen["preset"], FIELDS)
        return cls(**chosen)

    @classmethod
    def for_picture(cls, values: Mapping[str, Any]) -> tuple[Choices, tuple[str, ...]]:
        """Read a mapping for one picture. A value that the picture does not need cannot end it.

        Returns:
            (choices, notes). A field that the picture does not depend on, and whose value cannot be
            used, has its default; a note says so.

        Raises:
            OptionError: As `parse`, for the fields that this picture depends on.
        """
        needed = _needed_fields(values)
        usable, notes = dict(values), []
        for name in values:
            if name not in BY_NAME or name in needed or values[name] is None:
                continue
            try:
                checked(BY_NAME[name], values[name])
            except OptionError as exc:
                del usable[name]
                notes.append(f"{BY_NAME[name].label} ignored: {exc}")
        return cls.parse(usable), tuple(notes)

    @property
    def ignores(self) -> frozenset[str]:
        """Components that stay eager, as `core.options.parse_ignores` names them."""
        names = [c.lower() for c in BY_NAME["components"].choices if c not in self.components]
        if self.vae == "ignore all":
            names.append("vae")
        elif self.vae == "ignore encoder":
            names.append("vae_encoder")
        return parse_ignores(names)

    def warm_up_shapes(self) -> list[BatchShape]:
        """The list of warm-up sizes.

        Raises:
            ShapeError: An entry is not a size.
        """
        return parse_sizes(self.sizes)

    def outside_reason(self, width_px: int, height_px: int, batch: int) -> str | None:
        """Why an image of this size runs eager, outside size box or batch range; None inside.

        Raises:
            OptionError: Size box or batch range cannot be read.
        """
        box_reason = size_box_reason(self.size_box, width_px, height_px)
        range_reason = batch_range_reason(self.batch_range, batch)
        return box_reason or range_reason

    def check_features(self, features: frozenset[str]) -> None:
        """Raise OptionError when a choice needs a feature that the host lacks."""
        for field in FIELDS:
            is_missing = field.feature and field.feature not in features
            if is_missing and getattr(self, field.name) != field.default:
                raise OptionError(
                    f"{field.label} is unavailable in this WebUI.", "Use the preset Balanced."
                )

    def compile_options(
        self, *, store: Path | None = None, store_limit_bytes: int | None = None, **more: Any
    ) -> CompileOptions:
        """The options of a session; `more` are further fields of `CompileOptions`."""
        if store_limit_bytes is not None:
            more["store_limit_bytes"] = store_limit_bytes
        return CompileOptions(
            backend=self.backend,
            captures=self.captures,
            precision=self.precision,
            store=store,
            **more,
        )

    def changes(self) -> dict[str, str]:
        """The choices that make pictures differ from the model's own; empty when none does."""
        if not self.enabled:
            return {}
        found = {}
        deepcache = DeepCacheOptions.parse(self.deepcache)
        if deepcache.is_on:
            found["deepcache"] = str(deepcache)
        guidance_steps = GuidanceOptions.parse(self.guidance_steps)
        if guidance_steps.is_on:
            found["guidance_steps"] = str(guidance_steps)
        return found | precision_changes(self.precision, self.ignores)


def _needed_fields(values: Mapping[str, Any]) -> set[str]:
    """The fields that a picture with these choices depends on."""
    deciding = {"enabled", "preset"}
    first = Choices.parse({name: values[name] for name in deciding & values.keys()})
    if not first.enabled:
        return deciding
    decided = preset_values(first.preset, FIELDS)
    return {f.name for f in FIELDS if f.is_for_pictures and f.name not in decided}


def on_failure_of(values: Mapping[str, Any]) -> str:
    """What to do about a picture whose choices cannot be used: its own choice "on_failure".

    A choice that cannot be used itself counts as not given.
    """
    field = BY_NAME["on_failure"]
    try:
        return str(checked(field, values.get(field.name, field.default)))
    except OptionError:
        return str(field.default)


def from_arguments(arguments: Sequence[Any]) -> dict[str, Any]:
    """Script arguments as a mapping: positional ones, or one dict among them.

    A dict replaces all positional arguments, which are the host's defaults then. A dict without
    ``enabled`` enables OneDiff. A dict without ``preset`` means Custom when it has a field that
    presets decide. A positional argument that cannot be used is no default: it stays, so that the
    user hears of it.
    """
    positional = {
        field.name: from_control(field, value)
        for field, value in zip(FIELDS, arguments, strict=False)
        if value is not None and not isinstance(value, Mapping)
    }
    for argument in arguments:
        if isinstance(argument, Mapping):
            is_custom = any(
                name in BY_NAME and BY_NAME[name].decided_by_preset for name in argument
            )
            preset = {"preset": CUSTOM} if is_custom else {}
            return {"enabled": True, **preset, **argument, **_unusable(positional)}
    return positional


def _unusable(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        try:
            checked(BY_NAME[name], value)
        except OptionError:
            found[name] = value
    return found
