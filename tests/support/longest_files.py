"""The test files that take longest, which a run in several processes starts first.

Otherwise the last one to start leaves a process alone at the end. A file that is missing here only
starts later; seconds of processor time with nothing kept from an earlier run. Those of a machine
that took twice as long were halved: only the order counts.
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
    "features/test_features.py": 48,
    "faults/test_builder_processes.py": 47,
    "faults/test_run_interrupted.py": 47,
    "hosts/diffusers/test_transformers.py": 47,
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
    "cli/test_cli_img2img.py": 33,
    "faults/test_run_disk.py": 31,
    "building/test_busy_cpu.py": 30,
    "engine/deepcache/test_deepcache_reference.py": 30,
    "engine/test_soundness_of_classes.py": 28,
    "engine/test_soundness_of_globals.py": 28,
    "hosts/forge/test_forge.py": 26,
    "webui/deepcache/test_webui_deepcache.py": 26,
    "standalone/test_page.py": 25,
    "session/test_warm_up.py": 23,
    "hosts/diffusers/test_plain_calls.py": 22,
    "building/test_exporting.py": 21,
    "contracts/test_docs.py": 20,
    "engine/cuda_graphs/test_derived_stamp.py": 18,
    "hosts/diffusers/test_transformers_in_8_bits.py": 18,
    "engine/cuda_graphs/test_text_kv.py": 17,
    "webui/deepcache/test_feature_validity.py": 16,
    "differential/test_memcheck.py": 15,
    "cli/test_cli_process.py": 15,
    "building/test_worker_start.py": 15,
    "hosts/diffusers/test_checkpoint_round_trip.py": 15,
    "faults/test_end_of_process.py": 13,
    "hosts/diffusers/test_drawing.py": 13,
    "faults/test_power_loss.py": 13,
    "standalone/test_standalone_warm_up.py": 12,
    "hosts/diffusers/test_persistence.py": 12,
    "engine/deepcache/test_deepcache_cuda_graphs.py": 11,
    "building/test_without_posix.py": 11,
    "building/test_load_checks.py": 11,
    "cli/test_cli_graphs.py": 10,
    "standalone/test_page_gpus.py": 10,
    "building/test_worker_failures.py": 9,
    "session/test_status.py": 9,
    "faults/test_run_store.py": 9,
    "hosts/diffusers/test_compiled_pipes.py": 9,
    "engine/test_never_wrong.py": 9,
    "contracts/test_vae_hosts.py": 8,
    "engine/test_weights.py": 8,
    "hosts/forge/test_faults.py": 8,
}


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests with those of the longest files first; the others stay in their order."""

    def seconds(item: pytest.Item) -> int:
        return SECONDS.get(item.nodeid.partition("::")[0].removeprefix("tests/"), 0)

    return sorted(items, key=seconds, reverse=True)
