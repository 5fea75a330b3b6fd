"""Small stand-ins for the API of a WebUI: what our scripts touch of it, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.base import HostCheckpoint, WebUIHost


class StandInScript:
    """`modules.scripts.Script`, as far as ours use it."""

    infotext_fields = None
    paste_field_names = None

    def on_after_component(self, callback: Callable[[Any], None], *, elem_id: str) -> None:
        vars(self).setdefault("found", {})[elem_id] = callback

    def elem_id(self, item_id: str) -> str:
        return f"script_{item_id}"


class StandInOption:
    """`modules.shared.OptionInfo`."""

    def __init__(
        self, default: Any, label: str, component: Any, arguments: Any, section: Any
    ) -> None:
        self.default, self.label, self.section = default, label, section
        self.component, self.arguments, self.help = component, arguments, ""

    def info(self, text: str) -> StandInOption:
        self.help = text
        return self


class StandInOptions:
    """`modules.shared.opts`."""

    def __init__(self, **values: Any) -> None:
        self.labels: dict[str, StandInOption] = {}
        vars(self).update(values)

    def add_option(self, key: str, info: StandInOption) -> None:
        self.labels[key] = info
        if key not in vars(self):
            setattr(self, key, info.default)


@dataclass
class StandInState:
    """`modules.shared.state`."""

    interrupted: bool = False
    skipped: bool = False
    stopping_generation: bool = False
    job: str = ""
    job_count: int = 0

    def interrupt(self) -> None:
        self.interrupted = True


@dataclass
class StandInJob:
    """The host's processing object ``p``."""

    width: int = 512
    height: int = 512
    batch_size: int = 1
    n_iter: int = 1
    prompt: Any = "a cat"
    negative_prompt: str = "blurry"
    seed: Any = 7
    subseed: Any = -1
    subseed_strength: float = 0.0
    steps: int = 4
    sampler_name: str = "Euler"
    scheduler: str = "Automatic"
    cfg_scale: float = 7.0
    denoising_strength: float = 0.5
    styles: list[str] = field(default_factory=list)
    override_settings: dict[str, Any] = field(default_factory=dict)
    extra_generation_params: dict[str, Any] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    init_images: list[Any] = field(default_factory=list)

    def comment(self, text: str) -> None:
        self.comments.append(text)

    def close(self) -> None:
        """Nothing to give back."""


class EagerHost(WebUIHost):
    """A host without a model: all of a job runs eager, for a reason if it is given one."""

    name = "stand-in"

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.steps: list[BatchShape] = []

    def families(self) -> Sequence[BlockFamily]:
        return ()

    def rules(self) -> Sequence[WrapperRule]:
        return ()

    def checkpoint(self) -> HostCheckpoint | None:
        return None

    def models(self, ignores: frozenset[str]) -> list[tuple[str, nn.Module]]:
        return []

    def refusal_reason(self, job: Any) -> str | None:
        return self.reason

    def attach(self, patches: Patches, model: nn.Module, component: str) -> None:
        """Nothing is attached."""

    def step(self, shape: BatchShape, noise: torch.Generator) -> None:
        self.steps.append(shape)

    def vae_step(self) -> None:
        """It has none."""

    def run_exclusively(self, task: Callable[[], None]) -> None:
        task()


def install_modules(monkeypatch: pytest.MonkeyPatch, **options: Any) -> SimpleNamespace:
    """Put a package `modules` in place; returns what tests look at.

    Our own modules that were imported against an earlier one are forgotten.
    """
    for name in list(sys.modules):
        if name == "modules" or name.startswith(("modules.", "onediff_ext.webui")):
            monkeypatch.delitem(sys.modules, name)
    callbacks: dict[str, list[Callable[..., Any]]] = {}

    def on(name: str) -> Callable[[Any], None]:
        return lambda callback: callbacks.setdefault(name, []).append(callback)

    names = (
        "on_ui_settings",
        "on_before_ui",
        "on_app_started",
        "on_cfg_denoiser",
        "on_model_loaded",
        "on_script_unloaded",
    )
    shared = SimpleNamespace(
        opts=StandInOptions(**options),
        OptionInfo=StandInOption,
        state=StandInState(),
        cmd_opts=SimpleNamespace(
            api=True, api_auth=None, disable_extension_access=False, hide_ui_dir_config=False
        ),
        sd_model=SimpleNamespace(sd_checkpoint_info=SimpleNamespace(shorthash="abc")),
    )
    parts = {
        "scripts": SimpleNamespace(Script=StandInScript, AlwaysVisible=object(), scripts_data=[]),
        "shared": shared,
        "ui_components": SimpleNamespace(),
        "script_callbacks": SimpleNamespace(**{name: on(name) for name in names}),
        "processing": SimpleNamespace(),
        "sd_models": SimpleNamespace(),
    }
    package = ModuleType("modules")
    monkeypatch.setitem(sys.modules, "modules", package)
    for name, part in parts.items():
        module = ModuleType(f"modules.{name}")
        vars(module).update(vars(part))
        setattr(package, name, module)
        monkeypatch.setitem(sys.modules, f"modules.{name}", module)
    return SimpleNamespace(
        shared=sys.modules["modules.shared"],
        scripts=sys.modules["modules.scripts"],
        processing=sys.modules["modules.processing"],
        sd_models=sys.modules["modules.sd_models"],
        callbacks=callbacks,
    )
