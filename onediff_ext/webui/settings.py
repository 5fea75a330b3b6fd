"""The settings page "OneDiff" and the meaning of its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onediff_ext.core.options import BACKENDS, CompileOptions
from onediff_ext.panel.fields import DEEPCACHE, DRAW_WITHOUT, STOP

SECTION = ("onediff", "OneDiff")
HOST_FEATURES: frozenset[str] = frozenset({DEEPCACHE})
"""The entries of `panel.fields.FEATURES` that work inside a WebUI."""
BUILDS = {
    "in the background": "background",
    "after the first step": "wait",
    "only by Warm up now": "never",
}
"""The setting's text → `CompileOptions.build`."""

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
    """

    key: str
    label: str
    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    span: tuple[float, float, float] | None = None


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
    Setting("onediff_warm_up", "When a checkpoint loads, warm up", WARM_UPS[0], choices=WARM_UPS),
    Setting("onediff_warm_up_sizes", "Sizes for that", "", "such as 512x768, 1024x1024@2"),
    Setting(
        "onediff_on_failure",
        "If graphs cannot be used",
        DRAW_WITHOUT,
        choices=(DRAW_WITHOUT, STOP),
    ),
    Setting("onediff_infotext", "Write OneDiff's choices into infotext", True),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}


class Settings:
    """The current values, read from the host at each call.

    Args:
        options: The host's ``shared.opts``, or a mapping for tests.
    """

    def __init__(self, options: Any) -> None:
        self._options = options

    def get(self, key: str) -> Any:
        """A setting's value; its default when the host has no usable one."""
        default = BY_KEY[key].default
        if isinstance(self._options, Mapping):
            value = self._options.get(key, default)
        else:
            value = getattr(self._options, key, default)
        choices = BY_KEY[key].choices
        return default if value is None or (choices and value not in choices) else value

    @property
    def store(self) -> Path | None:
        """The folder of the graph store; None for the user's cache folder."""
        folder = str(self.get("onediff_store")).strip()
        return Path(folder).expanduser() if folder else None

    @property
    def store_limit_bytes(self) -> int:
        """The store's size limit."""
        try:
            return max(1, int(float(self.get("onediff_store_limit_gb")) * 2**30))
        except (TypeError, ValueError, OverflowError):  # a config file may say anything
            return CompileOptions.store_limit_bytes

    @property
    def build(self) -> str:
        """When missing graphs are built, as `CompileOptions.build`."""
        return BUILDS[self.get("onediff_build")]


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
