"""Registration of the host's callbacks, each time that the host loads the scripts."""

from __future__ import annotations

import logging
from typing import Any

from onediff_ext.core.errors import OneDiffError
from onediff_ext.webui import extension

logger = logging.getLogger(__name__)


def register() -> None:
    """Register all callbacks. "Reload UI" clears them and loads the scripts again."""
    from modules import script_callbacks

    script_callbacks.on_ui_settings(_add_settings)
    script_callbacks.on_before_ui(_add_axes)
    script_callbacks.on_app_started(_add_routes)
    script_callbacks.on_app_started(_read_ahead)
    script_callbacks.on_app_started(_serve_batches)
    script_callbacks.on_cfg_denoiser(_before_step)
    script_callbacks.on_model_loaded(_drop_gone_models)
    script_callbacks.on_model_loaded(_warm_up_loaded)
    script_callbacks.on_script_unloaded(_unload)


def _add_settings() -> None:
    import gradio
    from modules import shared

    from onediff_ext.webui.host_access import hides_folders
    from onediff_ext.webui.settings import add_settings

    with_folders = not hides_folders(shared.cmd_opts)
    add_settings(shared.opts, shared.OptionInfo, gradio, with_folders=with_folders)


def _add_axes() -> None:
    from onediff_ext.webui.xyz import add_axes, find_xyz_grid

    xyz_grid = find_xyz_grid()
    if xyz_grid is not None:
        add_axes(xyz_grid)


def _add_routes(_: Any, app: Any) -> None:
    from modules import shared

    from onediff_ext.hosts.detect import host_name
    from onediff_ext.webui.always_visible import PANEL_HOST
    from onediff_ext.webui.host_access import ApiAccess
    from onediff_ext.webui.rest import add_routes

    # Routes are added only where the host itself has an API.
    if shared.cmd_opts.api or getattr(shared.cmd_opts, "nowebui", False):
        add_routes(app, PANEL_HOST, ApiAccess.of(shared.cmd_opts), host_name())


def _read_ahead(*_: Any) -> None:
    try:
        extension.current().read_ahead()
    except OneDiffError as exc:
        logger.debug("No graphs are loaded at the start: %s", exc)


def _serve_batches(*_: Any) -> None:
    from onediff_ext.webui.other_gpus.worker import start_if_asked

    start_if_asked()


def _before_step(parameters: Any) -> None:
    extension.current().graphs.before_step(parameters)


def _drop_gone_models(_: Any) -> None:
    state = extension.existing()
    if state is not None:
        state.graphs.model_loaded()


def _warm_up_loaded(_: Any) -> None:
    from modules import shared

    from onediff_ext.webui.always_visible import PANEL_HOST
    from onediff_ext.webui.other_gpus.worker import is_worker
    from onediff_ext.webui.settings import WARM_UPS, Settings

    if is_worker():
        return  # a batch would wait for it
    settings = Settings(shared.opts)
    wanted = settings.get("onediff_warm_up")
    state = extension.existing()
    if wanted == WARM_UPS[0] or (state is not None and state.graphs.builds_are_paused):
        return
    from onediff_ext.panel.choices import Choices

    sizes = settings.get("onediff_warm_up_sizes") if wanted == WARM_UPS[1] else ""
    try:
        PANEL_HOST.start_warm_up(Choices.parse({"enabled": True, "sizes": sizes}))
    except OneDiffError as exc:
        logger.warning("No warm-up: %s", exc)


def _unload() -> None:
    from onediff_ext.webui.xyz import find_xyz_grid, remove_axes

    extension.close_current()
    xyz_grid = find_xyz_grid()
    if xyz_grid is not None:
        remove_axes(xyz_grid)
