"""The file that the WebUI loads. The WebUI finds the scripts as classes of this module."""

from onediff_ext.webui.always_visible import OneDiffScript
from onediff_ext.webui.batch_script import BatchScript
from onediff_ext.webui.callbacks import register
from onediff_ext.webui.legacy_script import OldNameScript

__all__ = ["BatchScript", "OldNameScript", "OneDiffScript"]

register()
