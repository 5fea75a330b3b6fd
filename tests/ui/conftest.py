"""The stand-in host, for the texts of the WebUI's own scripts."""

from tests.webui.conftest import host

__all__ = ["host"]
