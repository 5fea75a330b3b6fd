"""The test files that take longest, which a run in several processes starts first.

Otherwise the last one to start leaves a process alone at the end. A file that is missing here only
starts later; seconds of processor time with nothing kept from an earlier run.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

SECONDS = {
    "hosts/forge/test_forge_transformers.py": 120,
    "engine/test_equals_eager.py": 95,
    "engine/test_soundness.py": 90,
    "engine/test_any_size.py": 75,
    "hosts/diffusers/test_demo_model.py": 61,
    "contracts/test_backend_contract.py": 53,
    "faults/test_builder_processes.py": 47,
    "faults/test_run_interrupted.py": 47,
    "engine/deepcache/test_deepcache_pipelines.py": 46,
    "engine/cfg_parallel/test_cfg_parallel.py": 45,
    "backends/inductor/test_compiler_files.py": 41,
    "benchmarks/test_plain.py": 40,
    "hosts/diffusers/test_transformer_pipelines.py": 38,
    "differential/test_differential.py": 38,
    "engine/test_soundness_of_layers.py": 37,
    "contracts/test_standalone_form.py": 35,
    "building/test_background_builds.py": 34,
    "engine/cuda_graphs/test_captured_forward.py": 33,
    "faults/test_run_disk.py": 31,
    "building/test_busy_cpu.py": 30,
    "engine/deepcache/test_deepcache_reference.py": 30,
    "standalone/test_page.py": 25,
    "session/test_warm_up.py": 23,
    "hosts/diffusers/test_plain_calls.py": 22,
    "building/test_exporting.py": 21,
    "contracts/test_docs.py": 20,
    "differential/test_memcheck.py": 15,
    "standalone/test_standalone_warm_up.py": 12,
}


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests with those of the longest files first; the others stay in their order."""

    def seconds(item: pytest.Item) -> int:
        return SECONDS.get(item.nodeid.partition("::")[0].removeprefix("tests/"), 0)

    return sorted(items, key=seconds, reverse=True)
