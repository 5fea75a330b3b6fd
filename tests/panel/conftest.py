"""The stand-in host, for the texts of the WebUI's own scripts."""

from tests.support.webui_fixtures import host

__all__ = ["host"]
