"""Create tests/golden/deepcache-reference.safetensors with the reference implementation.

    pip install --target /tmp/reference --no-deps DeepCache==0.1.1
    python -m tools.deepcache.golden /tmp/reference

Run from the repository's root. Latents [1, 4, h, w] of the small models, in float64 on a CPU,
named "<model>/<interval>/<branch>"; the settings are those of `tests.support.deepcache_golden`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

from tests.support.deepcache_golden import CASES, GOLDEN, draw_golden, golden_pipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", type=Path, help="where DeepCache 0.1.1 was installed")
    reference = _load(parser.parse_args().reference)
    torch.set_num_threads(1)
    latents = {}
    for case in CASES:
        pipe = golden_pipe(case.model)
        helper = reference.DeepCacheSDHelper(pipe)
        helper.set_params(cache_interval=case.interval, cache_branch_id=case.branch)
        helper.enable()
        latents[case.name] = draw_golden(pipe).contiguous()
        print(case.name, tuple(latents[case.name].shape))
    save_file(latents, str(GOLDEN), metadata={"made with": "DeepCache 0.1.1"})


def _load(folder: Path) -> ModuleType:
    # By its file, so that nothing else of the package is imported.
    path = folder / "DeepCache" / "extension" / "deepcache.py"
    spec = importlib.util.spec_from_file_location("deepcache_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
