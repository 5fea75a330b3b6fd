"""The settings page "OneDiff" and the meaning of its values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import check
from onediff_ext.core.options import BACKENDS, CompileOptions
from onediff_ext.core.typed_paths import typed_path
from onediff_ext.panel.field_schema import FORMATS
from onediff_ext.panel.fields import DEEPCACHE, DRAW_WITHOUT, STOP

logger = logging.getLogger(__name__)

SECTION = ("onediff", "OneDiff")
HOST_FEATURES: frozenset[str] = frozenset({DEEPCACHE})
"""The entries of `panel.fields.FEATURES` that work inside a WebUI."""
BUILDS = {
    "in the background": "background",
    "after the first step": "wait",
    "only by Build now": "never",
}
"""The setting's text → `CompileOptions.build`."""

# The page's slider ends before; a config file may have more.
_LARGEST_NUMBER = 1_000_000
_EARLIER_TEXTS = {"only by Warm up now": "only by Build now"}
"""Texts that a config file of version 0.2 may have → the present ones."""

WARM_UPS = ("nothing", "the sizes below", "the sizes of recent images")


@dataclass(frozen=True)
class Setting:
    """One setting.

    Args:
        key: Its name in the host's config file.
        label, help: Shown to the user.
        default: Its value until the user changes it.
        choices: The accepted values; empty for any.
        span: (lowest, highest, step) of a number.
        format: The format of a text, a key of `field_schema.FORMATS`; ``""`` for any text.
    """

    key: str
    label: str
    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    span: tuple[float, float, float] | None = None
    format: str = ""


SETTINGS = (
    Setting("onediff_store", "Store folder", "", "empty: the user's cache folder"),
    Setting(
        "onediff_store_limit_gb",
        "Store limit in GB",
        CompileOptions.store_limit_bytes / 2**30,
        "above it, the least recently used graphs are deleted",
        span=(1, 200, 1),
    ),
    Setting(
        "onediff_backend",
        "Backend of the presets",
        BACKENDS[0],
        "builds the graphs unless the preset is Custom",
        BACKENDS,
    ),
    Setting("onediff_build", "Build missing graphs", next(iter(BUILDS)), choices=tuple(BUILDS)),
    Setting(
        "onediff_tuning",
        "Tune graphs while the machine is idle",
        CompileOptions.tuning != "off",
        "builds them again with more effort and keeps the faster ones; for GPUs",
    ),
    Setting("onediff_warm_up", "When a checkpoint loads, warm up", WARM_UPS[0], choices=WARM_UPS),
    Setting(
        "onediff_warm_up_sizes",
        "Sizes for that",
        "",
        "such as 512x768, 1024x1024@2",
        format="sizes",
    ),
    Setting(
        "onediff_on_failure",
        "If graphs cannot be used",
        DRAW_WITHOUT,
        choices=(DRAW_WITHOUT, STOP),
    ),
    Setting("onediff_infotext", "Write OneDiff's choices into infotext", True),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}


def setting_schema(setting: Setting) -> dict[str, Any]:
    """The JSON Schema of a setting's values."""
    schema: dict[str, Any] = {"title": setting.label, "default": setting.default}
    if setting.help:
        schema["description"] = setting.help
    if setting.choices:
        return {**schema, "type": "string", "enum": list(setting.choices)}
    if setting.span is not None:
        return {**schema, "type": "number", "minimum": 0, "maximum": _LARGEST_NUMBER}
    if isinstance(setting.default, bool):
        return {**schema, "type": "boolean"}
    return {**schema, "type": "string", **({"format": setting.format} if setting.format else {})}


class Settings:
    """The current values, read from the host at each call.

    Args:
        options: The host's ``shared.opts``, or a mapping for tests.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self._told: set[str] = set()

    def get(self, key: str) -> Any:
        """A setting's value; its default when the host has no usable one, which is logged once."""
        setting = BY_KEY[key]
        if isinstance(self._options, Mapping):
            value = self._options.get(key)
        else:
            value = getattr(self._options, key, None)
        if value is None:
            return setting.default
        if isinstance(value, str):
            value = _EARLIER_TEXTS.get(value, value)
        try:
            check(value, setting_schema(setting), f"The setting {setting.label!r}", FORMATS)
        except OptionError as exc:
            if str(exc) not in self._told:
                self._told.add(str(exc))
                logger.warning("%s Until then it is %r.", exc, setting.default)
            return setting.default
        return value

    @property
    def store(self) -> Path | None:
        """The folder of the graph store; None for the user's cache folder."""
        return typed_path(str(self.get("onediff_store")))

    @property
    def store_limit_bytes(self) -> int:
        """The store's size limit."""
        return max(1, int(self.get("onediff_store_limit_gb") * 2**30))

    @property
    def build(self) -> str:
        """When missing graphs are built, as `CompileOptions.build`."""
        return BUILDS[self.get("onediff_build")]

    @property
    def tuning(self) -> str:
        """When graphs are tuned, as `CompileOptions.tuning`."""
        return "idle" if self.get("onediff_tuning") else "off"


def add_settings(options: Any, option_info: Any, gradio: Any, *, with_folders: bool = True) -> None:
    """Add the page to the host's settings.

    Args:
        options: The host's ``shared.opts``.
        option_info: The host's ``OptionInfo``.
        gradio: The gradio module that the host uses.
        with_folders: Whether to show folders. The flag ``--hide-ui-dir-config`` hides them.
    """
    for setting in SETTINGS:
        component: Any = None
        arguments: dict[str, object] | None = None
        if setting.choices:
            component, arguments = gradio.Radio, {"choices": list(setting.choices)}
        elif setting.span is not None:
            lowest, highest, step = setting.span
            component = gradio.Slider
            arguments = {"minimum": lowest, "maximum": highest, "step": step}
        elif setting.key == "onediff_store" and not with_folders:
            component, arguments = gradio.Textbox, {"visible": False}
        info = option_info(setting.default, setting.label, component, arguments, section=SECTION)
        if setting.help:
            info = info.info(setting.help)
        # A store holds native code. An API client that may set options could otherwise point the
        # store to files that it has uploaded.
        info.restrict_api = setting.key == "onediff_store"
        options.add_option(setting.key, info)
