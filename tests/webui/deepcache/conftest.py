"""One WebUI stand-in for each host; all tests of a module share one store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from onediff_ext.core.options import CompileOptions
from tests.support import a1111_stand_in, forge_stand_in
from tests.support.deepcache_webui_host import ADAPTERS, DeepCacheWebUI


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> CompileOptions:
    store = tmp_path_factory.mktemp("store")
    return CompileOptions(backend="eager", build="wait", store=store, workers=1)


@pytest.fixture(params=sorted(ADAPTERS))
def host(request: pytest.FixtureRequest, options: CompileOptions) -> Iterator[DeepCacheWebUI]:
    with ExitStack() as stack:
        if request.param == "a1111":
            stand_in: Any = stack.enter_context(a1111_stand_in.a1111())
        else:
            stand_in = stack.enter_context(forge_stand_in.running(request.param))
        yield DeepCacheWebUI(request.param, stand_in, options)
