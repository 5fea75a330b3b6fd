"""Starts a WebUI's own launcher inside its virtual environment: python run_in_venv.py launch.py …

Some indexes have torchvision for CUDA only. Beside a CPU build of PyTorch its compiled operators
cannot be loaded, and its import then fails at the first one that it describes. No test of a
WebUI calls them, so their names are enough.
"""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def name_torchvision_operators() -> None:
    """Make `import torchvision` work where its compiled operators cannot be loaded."""
    import torch

    found = PathFinder.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        for path in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(path))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


_kept: list[object] = []

if __name__ == "__main__":
    name_torchvision_operators()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
