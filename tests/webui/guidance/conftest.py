"""One WebUI stand-in for each host, as DeepCache's tests have."""

from __future__ import annotations

from tests.webui.deepcache.conftest import host, options  # noqa: F401
