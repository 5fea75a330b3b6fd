"""The table of ``benchmarks.webui --breakdown``: where a picture's seconds go."""

from __future__ import annotations

from typing import Any

from benchmarks.small_gpu_table import WEBUIS
from benchmarks.webui_phases import SAMPLER, STEPS

SCRIPTS = "scripts"
_HOW = {"eager": "without", "ours-exact": "with", "ours-fp8": "with, fp8"}
# In the order of a picture; what a host has beside these is summed.
COLUMNS = {
    STEPS: ("UNet",),
    "sampler beside it": (SAMPLER,),
    "VAE": ("VAE", "image to latents"),
    "PNG": ("PNG",),
    "API": ("the API's answer", "rest of the request"),
    SCRIPTS: (SCRIPTS,),
}


def phases_table(runs: list[dict[str, Any]], task: str = "txt2img") -> str:
    """Milliseconds of a picture's phases, without and with OneDiff, by host, GPU and size.

    Args:
        runs: Of `benchmarks.webui`, with phases.
        task: Of "txt2img" and "img2img".
    """
    titles = ["host", "GPU", "size", "", "picture", *COLUMNS, "rest"]
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    for run in runs:
        name = WEBUIS.get(run["host"], run["host"])
        gpu = run["fingerprint"]["gpu"].removeprefix("NVIDIA ").split()[0]
        rows = [row for row in run["rows"] if row["task"] == task and "phases" in row]
        sizes = list(dict.fromkeys((row["width"], row["height"]) for row in rows))
        for width, height in sizes:
            for row in rows:
                if (row["width"], row["height"]) == (width, height):
                    how = _HOW[row["contender"]]
                    cells = [name, gpu, f"{width}x{height}", how, *_cells(row)]
                    lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    phases = dict(row["phases"])
    found = [sum(phases.pop(part, 0.0) for part in parts) for parts in COLUMNS.values()]
    milliseconds = [row["seconds"], *found, sum(phases.values())]
    return [f"{1e3 * seconds:.0f}" for seconds in milliseconds]
