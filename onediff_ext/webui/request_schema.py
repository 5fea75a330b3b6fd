"""The one schema of everything that a WebUI's users and API clients send to this extension."""

from __future__ import annotations

from typing import Any

from onediff_ext.panel.field_schema import field_schema, object_schema, schema
from onediff_ext.panel.fields import BY_NAME, fields_for
from onediff_ext.panel.presets import presets_for
from onediff_ext.webui import batch_arguments
from onediff_ext.webui.settings import HOST_FEATURES, SETTINGS, setting_schema
from onediff_ext.webui.xyz import AXES


def request_schema() -> dict[str, Any]:
    """The fields and presets, and a JSON Schema for each kind of request under ``$defs``.

    ``choices`` is the object under ``alwayson_scripts`` and the body of ``POST /warmup``, ``empty``
    the body of routes that take nothing, ``batch_script`` the argument of the batch script,
    ``settings`` the entries of the host's settings, and ``xyz`` the values of each X/Y/Z axis.
    """
    described = schema(HOST_FEATURES)
    definitions: dict[str, Any] = dict(described["$defs"])  # type: ignore[call-overload]
    presets = list(presets_for(fields_for(HOST_FEATURES)))
    definitions["choices"]["properties"]["preset"]["enum"] = presets
    definitions |= {
        "batch_script": object_schema(batch_arguments.FIELDS),
        "settings": {
            "type": "object",
            "properties": {setting.key: setting_schema(setting) for setting in SETTINGS},
        },
        "xyz": {
            "type": "object",
            "properties": {name: field_schema(BY_NAME[name]) for name in AXES},
            "additionalProperties": False,
        },
    }
    return {**described, "$defs": definitions}
