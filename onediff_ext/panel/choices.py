"""What a user chose, checked: the same from panel, API, X/Y/Z and infotext."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import CompileOptions, parse_ignores
from onediff_ext.core.shapes import MAX_SIZES_CHARS, BatchShape, parse_sizes
from onediff_ext.panel.fields import (
    BY_NAME,
    CHECKBOX,
    CHECKBOXES,
    CUSTOM,
    FIELDS,
    PRESETS,
    Field,
    preset_values,
)

_BOX = re.compile(
    r"\s*(\d{1,9})\s*[x×*]\s*(\d{1,9})\s*(?:-|–|to)\s*(\d{1,9})\s*[x×*]\s*(\d{1,9})\s*",
    re.IGNORECASE,
)
_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:(?:-|–|to)\s*(\d{1,9})\s*)?", re.IGNORECASE)
_SHOWN_CHARS = 60
_SHOWN_MESSAGE_CHARS = 300


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
    deepcache: str = "off"

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None = None) -> Choices:
        """Take any mapping: missing names get their defaults, names of others are passed over.

        A preset other than Custom decides the fields that presets decide, whatever they say.

        Raises:
            OptionError: A value cannot be used; says which and what would do.
        """
        given = {k: v for k, v in (values or {}).items() if k in BY_NAME and v is not None}
        checked = {name: _checked(BY_NAME[name], value) for name, value in given.items()}
        chosen = {field.name: checked.get(field.name, field.default) for field in FIELDS}
        chosen |= preset_values(chosen["preset"])
        choices = cls(**chosen)
        choices.warm_up_shapes()
        choices.outside(512, 512, 1)
        return choices

    @property
    def ignores(self) -> frozenset[str]:
        """Components to leave alone, as `core.options.parse_ignores` names them."""
        names = [c.lower() for c in BY_NAME["components"].choices if c not in self.components]
        if self.vae == "ignore all":
            names.append("vae")
        elif self.vae == "ignore encoder":
            names.append("vae_encoder")
        return parse_ignores(names)

    def warm_up_shapes(self) -> list[BatchShape]:
        """The list of sizes.

        Raises:
            ShapeError: An entry is no size.
        """
        return parse_sizes(self.sizes)

    def outside(self, width_px: int, height_px: int, batch: int) -> str | None:
        """Why a picture of this size is not to use graphs, or None when it is.

        Raises:
            OptionError: Size box or batch range cannot be read.
        """
        box, batches = _parse_box(self.size_box), _parse_range(self.batch_range)
        if box is not None:
            low_w, low_h, high_w, high_h = box
            if not (low_w <= width_px <= high_w and low_h <= height_px <= high_h):
                return f"{width_px}x{height_px} is outside the size box {self.size_box.strip()}"
        if batches is not None and not batches[0] <= batch <= batches[1]:
            return f"{batch} at once is outside the batch range {self.batch_range.strip()}"
        return None

    def check_features(self, features: frozenset[str]) -> None:
        """Raise OptionError when something is chosen that a host with these features lacks."""
        for field in FIELDS:
            lacks = field.feature and field.feature not in features
            if lacks and getattr(self, field.name) != field.default:
                raise OptionError(
                    f"{field.label} is not to be had in this WebUI.", "Use the preset Balanced."
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
        """What of this makes other pictures than the model's own."""
        if not self.enabled:
            return {}
        found = {}
        deepcache = DeepCacheOptions.parse(self.deepcache)
        if deepcache.is_on:
            found["deepcache"] = str(deepcache)
        if self.precision != CompileOptions.precision:
            found["precision"] = self.precision
        return found

    def infotext(self) -> dict[str, str]:
        """Entries for a picture that was drawn with this; what is at its default is left out."""
        if not self.enabled:
            return {}
        entries = {"OneDiff": "on", "OneDiff preset": self.preset}
        decided = preset_values(self.preset)
        for field in FIELDS:
            value = getattr(self, field.name)
            if field.infotext in ("", *entries) or field.name in decided:
                continue
            if value != field.default:
                entries[field.infotext] = _to_text(value)
        return entries


def is_nested(value: object) -> bool:
    """Whether a value from JSON holds values that hold others: no field has one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(
        isinstance(part, (Mapping, list, tuple)) for part in value
    )


def from_infotext(field: Field, entries: Mapping[str, Any]) -> Any:
    """What an infotext says of a field; None when it has nothing of OneDiff."""
    if "OneDiff" not in entries:
        return None
    if field.name == "enabled":
        return _checked(field, entries["OneDiff"])
    text = entries.get(field.infotext)
    if text is None:
        decided = preset_values(_known_preset(entries.get("OneDiff preset")))
        value = decided.get(field.name, field.default)
    else:
        try:
            value = _checked(field, text)
        except OptionError:
            value = field.default
    return list(value) if isinstance(value, tuple) else value


def from_arguments(arguments: Sequence[Any]) -> dict[str, Any]:
    """Script arguments as a mapping: positional ones, or a dict in the first place.

    With a dict, the host's defaults at the other places do not count; naming the script
    without saying ``enabled`` enables it, and naming what presets decide without saying
    ``preset`` means Custom.
    """
    for argument in arguments:
        if isinstance(argument, Mapping):
            decides = any(name in BY_NAME and BY_NAME[name].preset for name in argument)
            return {"enabled": True, **({"preset": CUSTOM} if decides else {}), **argument}
    return {f.name: v for f, v in zip(FIELDS, arguments, strict=False) if v is not None}


def _known_preset(name: object) -> str:
    return str(name) if name in PRESETS else CUSTOM


def _checked(field: Field, value: Any) -> Any:
    """A value as the field has it; it may come from anybody: the API, an infotext, a grid's axis.

    Raises:
        OptionError: It cannot be used.
    """
    if isinstance(value, str) and len(value) > MAX_SIZES_CHARS:
        raise OptionError(
            f"{field.label}: a text of {len(value):,} characters is too long.",
            f"Use {MAX_SIZES_CHARS:,} at most.",
        )
    if is_nested(value):  # such a value may be too deep to be shown
        raise OptionError(f"{field.label}: the value is nested.", "Use a text or a number.")
    if field.form == CHECKBOX:
        if isinstance(value, str):
            return value.strip().lower() in ("1", "true", "on", "yes")
        if not isinstance(value, (bool, int, float)):
            raise _unusable(field, value, "Use true or false.")
        return bool(value)
    if field.form == CHECKBOXES:
        if not isinstance(value, (str, list, tuple, set, frozenset)):
            raise _unusable(field, value, f"Use a list of: {', '.join(field.choices)}.")
        names = re.split(r"[+,]", value) if isinstance(value, str) else list(value)
        wanted = {_one_of(field, name) for name in names if str(name).strip()}
        return tuple(choice for choice in field.choices if choice in wanted)
    if field.read is not None:
        try:
            return field.read(value)
        except OptionError as exc:
            raise OptionError(_cut(exc.message, _SHOWN_MESSAGE_CHARS), exc.hint) from exc
    if field.choices:
        return _one_of(field, value)
    if not isinstance(value, (str, int, float)):
        raise _unusable(field, value, "Use a text.")
    return str(value)


def _one_of(field: Field, value: object) -> str:
    wanted = value.strip().casefold() if isinstance(value, str) else str(value)[:_SHOWN_CHARS]
    for choice in field.choices:
        if choice.casefold() == wanted:
            return choice
    raise _unusable(field, value, f"Use one of: {', '.join(field.choices)}.")


def _unusable(field: Field, value: object, hint: str) -> OptionError:
    return OptionError(f"{field.label}: {_cut(repr(value))} is not known.", hint)


def _cut(text: str, most: int = _SHOWN_CHARS) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _to_text(value: Any) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _parse_box(text: str) -> tuple[int, int, int, int] | None:
    if not text.strip():
        return None
    match = _BOX.fullmatch(text)
    if match is None:
        raise OptionError(f'"{_cut(text)}" is not a size box.', 'Write "256x256 - 2048x2048".')
    low_w, low_h, high_w, high_h = (int(part) for part in match.groups())
    if low_w > high_w or low_h > high_h:
        raise OptionError(f'The size box "{text}" is empty.', "The smaller size comes first.")
    return low_w, low_h, high_w, high_h


def _parse_range(text: str) -> tuple[int, int] | None:
    if not text.strip():
        return None
    match = _RANGE.fullmatch(text)
    if match is None:
        raise OptionError(f'"{_cut(text)}" is not a batch range.', 'Write "1 - 4".')
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise OptionError(f'The batch range "{text}" is empty.', "The smaller number comes first.")
    return low, high
