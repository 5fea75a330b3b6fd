"""The settings under which an artefact is compiled; `test_stored_kernels` runs one on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn
from torch._inductor import config

from onediff_ext.backends.inductor.standalone_artefact import (
    CUDA_CONFIG,
    TUNED_CONFIG,
    build_artefact,
    can_be_tuned,
)
from onediff_ext.engine.export.exporter import input_fakes


def test_kernels_are_compiled_where_the_settings_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of compiler processes does not get them, and leaves our own kernels out."""
    seen: list[dict[str, Any]] = []

    class NotedError(Exception):
        """The settings have been noted."""

    def compile_nothing(*_: Any, **__: Any) -> None:
        names = ("compile_threads", "static_launch_user_defined_triton_kernels")
        seen.append({name: getattr(config, name) for name in names})
        raise NotedError

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_nothing)
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    with config.patch(compile_threads=4):
        with pytest.raises(NotedError):
            build_artefact(program.graph_module, input_fakes(program))
        assert config.compile_threads == 4
    assert seen == [{"compile_threads": 1, "static_launch_user_defined_triton_kernels": True}]


def test_a_tuned_graph_measures_products_while_it_is_built_and_nothing_else() -> None:
    assert can_be_tuned()
    assert set(CUDA_CONFIG) < set(TUNED_CONFIG)
    with config.patch(dict(TUNED_CONFIG)):
        assert config.max_autotune_gemm
        assert not config.deterministic  # it would forbid measurements
        assert config.test_configs.force_filter_reduction_configs
        assert not config.triton.autotune_pointwise
        assert not config.autotune_local_cache
