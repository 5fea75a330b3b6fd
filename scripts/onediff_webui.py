"""What the WebUI loads: the scripts are found by their names in this module."""

from onediff_ext.webui.always_visible import OneDiffScript
from onediff_ext.webui.batch_script import BatchScript
from onediff_ext.webui.callbacks import register
from onediff_ext.webui.legacy_script import OldNameScript

__all__ = ["BatchScript", "OldNameScript", "OneDiffScript"]

register()
