"""The test files that take longest, which a run in several processes starts first.

Otherwise the last one to start leaves a process alone at the end. A file that is missing here only
starts later. Seconds of processor time with nothing kept from an earlier run, except for the
compiled graphs that an earlier file builds; only the order counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

SECONDS = {
    "engine/test_equals_eager.py": 152,
    "engine/test_soundness.py": 59,
    "contracts/test_backend_contract.py": 56,
    "hosts/forge/test_forge_transformers.py": 48,
    "features/test_features.py": 44,
    "engine/deepcache/test_deepcache_pipelines.py": 42,
    "differential/test_differential.py": 40,
    "backends/inductor/test_compiler_files.py": 39,
    "hosts/diffusers/test_demo_model.py": 39,
    "faults/test_run_interrupted.py": 36,
    "engine/cfg_parallel/test_cfg_parallel.py": 35,
    "engine/test_soundness_of_layers.py": 34,
    "hosts/diffusers/test_transformers.py": 32,
    "cli/test_cli_img2img.py": 31,
    "building/test_background_builds.py": 27,
    "engine/cuda_graphs/test_captured_forward.py": 26,
    "webui/deepcache/test_webui_deepcache.py": 25,
    "hosts/forge/test_forge.py": 24,
    "engine/test_soundness_of_globals.py": 23,
    "engine/deepcache/test_deepcache_reference.py": 23,
    "faults/test_run_disk.py": 23,
    "contracts/test_standalone_form.py": 21,
    "standalone/test_page.py": 21,
    "engine/test_soundness_of_classes.py": 20,
    "building/test_busy_cpu.py": 20,
    "faults/test_builder_processes.py": 18,
    "building/test_exporting.py": 17,
    "session/test_warm_up.py": 17,
    "benchmarks/test_plain.py": 16,
    "hosts/diffusers/test_checkpoint_round_trip.py": 16,
    "engine/test_any_size.py": 16,
    "faults/test_end_of_process.py": 14,
    "building/test_worker_start.py": 14,
    "cli/test_cli_process.py": 13,
    "faults/test_kills.py": 13,
    "webui/deepcache/test_feature_validity.py": 12,
    "hosts/diffusers/test_transformers_in_8_bits.py": 12,
    "engine/cuda_graphs/test_derived_stamp.py": 12,
    "contracts/test_docs.py": 12,
    "engine/test_never_wrong.py": 11,
    "hosts/diffusers/test_persistence.py": 11,
    "building/test_load_checks.py": 11,
    "hosts/diffusers/test_transformer_pipelines.py": 11,
    "building/test_without_posix.py": 10,
    "engine/deepcache/test_deepcache_cuda_graphs.py": 10,
    "oneflow/test_table.py": 10,
    "faults/test_store_processes.py": 9,
    "faults/test_power_loss.py": 9,
    "tooling/test_wheel.py": 9,
    "hosts/diffusers/test_plain_calls.py": 9,
    "engine/cuda_graphs/test_text_kv.py": 8,
    "building/test_worker_failures.py": 8,
    "hosts/test_old_torch.py": 8,
    "hosts/diffusers/test_drawing.py": 8,
    "hosts/diffusers/test_compiled_pipes.py": 8,
    "session/test_status.py": 8,
    "engine/test_soundness_of_derived_weights.py": 8,
    "building/test_read_ahead.py": 8,
    "panel/test_panel.py": 8,
}


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The same tests with those of the longest files first; the others stay in their order."""

    def seconds(item: pytest.Item) -> int:
        return SECONDS.get(item.nodeid.partition("::")[0].removeprefix("tests/"), 0)

    return sorted(items, key=seconds, reverse=True)
