"""One WebUI stand-in for each host; all tests of a module share one store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onediff_ext.core.options import CompileOptions
from tests.support.deepcache_webui_host import ADAPTERS, DeepCacheWebUI
from tests.support.running_stand_in import running_stand_in


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    store = tmp_path_factory.mktemp("store")
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture(params=sorted(ADAPTERS))
def host(request: pytest.FixtureRequest, options: CompileOptions) -> Iterator[DeepCacheWebUI]:
    with running_stand_in(request.param) as stand_in:
        yield DeepCacheWebUI(request.param, stand_in, options)
