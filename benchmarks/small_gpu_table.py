"""The table of `benchmarks.small_gpu`: seconds of a picture under a memory limit."""

from __future__ import annotations

from typing import Any

WEBUIS = {"a1111": "A1111", "neo": "Forge Neo", "forge": "Forge", "reforge": "reForge"}
MODELS = {"sdxl": "SDXL", "sd15": "SD1.5", "sd1": "SD1.5"}
TITLES = (
    *("GPU memory", "host", "model", "picture", "without, s", "with OneDiff, s", "times faster"),
    "pictures, failed",
)


def small_gpu_table(runs: list[dict[str, Any]]) -> str:
    """Seconds of a picture without and with OneDiff, and the pictures that failed, by host.

    Args:
        runs: Of `benchmarks.small_gpu`, with both contenders.
    """
    lines = ["| " + " | ".join(TITLES) + " |", "|" + " --- |" * len(TITLES)]
    for run in runs:
        size = (run["rows"][0]["width"], run["rows"][0]["height"])
        by_name = {
            row["contender"]: row for row in run["rows"] if (row["width"], row["height"]) == size
        }
        alone, ours = by_name.get("host") or by_name["eager"], by_name["ours"]
        flags = [f for f in run.get("flags", ()) if "vram" in f]
        how = " ".join([WEBUIS.get(run["host"], run["host"]), *flags])
        if "offload" in run:
            how += f", {run['offload']} offloading"
        before_s, after_s = alone["picture_s"], ours["picture_s"]
        cells = (
            f"{run['gigabytes']:g} GB", how, MODELS.get(run["model"], run["model"]),
            _picture(size, run.get("job", {})), f"{before_s:.2f}", f"{after_s:.2f}",
            f"{before_s / after_s:.2f}", _failures(run),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _picture(size: tuple[int, int], job: dict[str, Any]) -> str:
    width, height = size
    count, scale = job.get("batch_size", 1), job.get("hr_scale", 1)
    text = f"{width}x{height}" if count == 1 else f"{count} of {width}x{height}"
    if scale != 1:
        text += f", hires-fix to {width * scale:g}x{height * scale:g}"
    return text


def _failures(run: dict[str, Any]) -> str:
    if "contenders" in run:
        ours = run["contenders"]["ours"]
        return f"{ours['pictures']}, {ours['failed']}"
    rows = [row for row in run["rows"] if row["contender"] == "ours"]
    drawn, failed = sum(len(row["seconds"]) for row in rows), sum(r["out_of_memory"] for r in rows)
    return f"{drawn}, {failed}"
