"""The host's callbacks. Called by the script each time that it is loaded, "Reload UI" included."""

from __future__ import annotations

import logging
from typing import Any

from onediff_ext.core.errors import OneDiffError
from onediff_ext.webui import extension

logger = logging.getLogger(__name__)


def register() -> None:
    """Ask the host to call us; the host forgets all callbacks when it loads scripts anew."""
    from modules import script_callbacks

    script_callbacks.on_ui_settings(_add_settings)
    script_callbacks.on_before_ui(_add_axes)
    script_callbacks.on_app_started(_add_routes)
    script_callbacks.on_cfg_denoiser(_before_step)
    script_callbacks.on_model_loaded(_let_go)
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
    from onediff_ext.webui.always_visible import PORT
    from onediff_ext.webui.host_access import ApiAccess
    from onediff_ext.webui.rest import add_routes

    # A host without an API gets none from us.
    if shared.cmd_opts.api or getattr(shared.cmd_opts, "nowebui", False):
        add_routes(app, PORT, ApiAccess.of(shared.cmd_opts), host_name())


def _before_step(parameters: Any) -> None:
    extension.current().acceleration.before_step(parameters)


def _let_go(_: Any) -> None:
    state = extension.existing()
    if state is not None:
        state.acceleration.model_loaded()


def _warm_up_loaded(_: Any) -> None:
    from modules import shared

    from onediff_ext.webui.always_visible import PORT
    from onediff_ext.webui.settings import WARM_UPS, Settings

    settings = Settings(shared.opts)
    wanted = settings.get("onediff_warm_up")
    if wanted == WARM_UPS[0]:
        return
    from onediff_ext.panel.choices import Choices

    sizes = settings.get("onediff_warm_up_sizes") if wanted == WARM_UPS[1] else ""
    try:
        PORT.start_warm_up(Choices.parse({"enabled": True, "sizes": sizes}))
    except OneDiffError as exc:
        logger.warning("Nothing is warmed up: %s", exc)


def _unload() -> None:
    from onediff_ext.webui.xyz import find_xyz_grid, remove_axes

    extension.close_current()
    xyz_grid = find_xyz_grid()
    if xyz_grid is not None:
        remove_axes(xyz_grid)
