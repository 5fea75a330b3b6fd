"""A folder in a running WebUI on one GPU and on several: ``python -m benchmarks.webui_gpus``.

The WebUI runs on this machine with ``--api`` and the checkpoint to measure. The batch script draws
one picture of each size first, so that the store has all graphs; then the folder with each number
of GPUs, a run of its own each. The seconds are those of the whole request: the start of the other
processes counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.fingerprint import fingerprint
from benchmarks.pictures import photograph
from benchmarks.results import write_result
from benchmarks.webui import JOB, wait_until_quiet
from onediff_ext.core.shapes import parse_sizes
from tests.support.webui_client import WebUI

SIZES = "1024x1024, 1152x896, 832x1216, 1344x768"
_SCRIPT = "onediff: img2img batch across resolutions"
_QUIET_LIMIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:7860")
    parser.add_argument("--model", default="sdxl", help="its name in the JSON file")
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--gpus", default="1,2", help="a run for each; beside the first one")
    parser.add_argument("--backend", default="", help="of OneDiff's graphs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    webui = WebUI(given.url, Path())
    with tempfile.TemporaryDirectory(prefix="onediff-benchmark-") as folder:
        figures = measure(webui, given, Path(folder))
    if given.json is not None:
        write_result(given.json, figures)
    return 0


def measure(webui: WebUI, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Draw the folder with each number of GPUs.

    Args:
        webui: The running WebUI.
        given: The command line.
        folder: For inputs and results.

    Returns:
        What goes into the JSON file.
    """
    import torch

    sizes = [(size.width_px, size.height_px) for size in parse_sizes(given.sizes)]
    _save_pictures(folder / "first", sizes, len(sizes))
    _save_pictures(folder / "in", sizes, given.pictures)
    _draw(webui, given, folder / "first", folder / "graphs", "1")
    wait_until_quiet(webui, _QUIET_LIMIT_S)
    rows: list[dict[str, Any]] = []
    for number, gpus in enumerate(given.gpus.split(",")):
        target = folder / f"out-{number}"
        start = time.monotonic()
        _draw(webui, given, folder / "in", target, gpus)
        seconds = time.monotonic() - start
        row = {"gpus": int(gpus), "seconds": round(seconds, 2)}
        if rows:
            row |= _beside(folder / "out-0", target)
            row["times_faster"] = round(rows[0]["seconds"] / seconds, 3)
        rows.append(row)
        print(row, flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "what": "a folder by the batch script inside a WebUI, on several GPUs",
        "model": given.model,
        "host": webui.host(),
        "fingerprint": fingerprint(device),
        "pictures": given.pictures,
        "sizes": given.sizes,
        "steps": given.steps,
        "strength": 1,
        "rows": rows,
    }


def _save_pictures(folder: Path, sizes: list[tuple[int, int]], count: int) -> None:
    folder.mkdir()
    for number in range(count):
        photograph(number, sizes[number % len(sizes)]).save(folder / f"{number:03}.png")


def _draw(webui: WebUI, given: argparse.Namespace, source: Path, target: Path, gpus: str) -> None:
    script = {"input": str(source), "output": str(target), "batch": 1, "gpus": gpus}
    first = np.asarray(Image.open(next(source.glob("*.png"))).convert("RGB"))
    webui.draw(
        {"enabled": True, **({"backend": given.backend} if given.backend else {})},
        "img2img",
        script_name=_SCRIPT,
        script_args=[script],
        init_images=[first],
        denoising_strength=1,
        **{**JOB, "steps": given.steps},
    )
    missing = len(list(source.iterdir())) - len(list(target.glob("*.png")))
    if missing:
        raise SystemExit(f"{missing} pictures were not drawn; the WebUI's console says why.")


def _beside(one: Path, other: Path) -> dict[str, int]:
    """How many pictures are equal, and the largest difference of a pixel's value."""
    equal, most = 0, 0
    for path in one.glob("*.png"):
        a, b = (np.asarray(Image.open(p).convert("RGB")) for p in (path, other / path.name))
        difference = int(np.abs(a.astype(int) - b).max())
        equal, most = equal + (difference == 0), max(most, difference)
    return {"equal": equal, "largest_difference": most}


if __name__ == "__main__":
    raise SystemExit(main())
