"""Tables of what FlashAttention 4 brings, where it is installed."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]
Table = tuple[list[str], list[list[Any]]]

SIZES = ((512, 512), (720, 720), (960, 720), (1024, 1024), (1536, 1024))
MODELS = {
    "flux": "Flux.1-dev",
    "sd35-medium": "SD3.5-medium",
    "sd35-large": "SD3.5-large",
    "z-image": "Z-Image",
    "sdxl": "SDXL",
    "sd1": "SD1.5",
}
PRECISIONS = {"ours-exact": "exact", "ours-fp8": "fp8"}
LIBRARY = "flash-attn-4"


def flash_models(figures: list[Figures]) -> Table:
    """Milliseconds of forwards: a line for each model and precision, a column for each size.

    Args:
        figures: Result files of `benchmarks.dit` or `benchmarks.unet`.

    Returns:
        Header and lines.
    """
    ms = {
        (found["model"], row["contender"], (row["width"], row["height"])): row["ms_median"]
        for found in figures
        for row in found["rows"]
        if "ms_median" in row
    }
    shown = [size for size in SIZES if any(key[2] == size for key in ms)]
    lines = []
    for model in dict.fromkeys(found["model"] for found in figures):
        for contender, precision in PRECISIONS.items():
            of_sizes = [ms.get((model, contender, size)) for size in shown]
            if any(of_sizes):
                cells = ["-" if value is None else f"{value:.1f}" for value in of_sizes]
                lines.append([f"{MODELS[model]}, {precision}", *cells])
    return ["", *(f"{width}x{height}" for width, height in shown)], lines


def flash_kernels(figures: Figures) -> Table:
    """Microseconds of self-attention by the library, and by what PyTorch chooses.

    Args:
        figures: A result file of `benchmarks.kernels`.

    Returns:
        Header and lines.
    """
    us = {
        (row["contender"], row["dtype"], tuple(row["shape"])): row["us_median"]
        for row in figures["rows"]
        if row["kernel"] == "self_attention"
    }
    lines = []
    for contender, dtype, shape in us:
        if contender == LIBRARY:
            eager, flash = us[("eager", dtype, shape)], us[(contender, dtype, shape)]
            lines.append([*shape, dtype, f"{eager:.0f}", f"{flash:.0f}", f"{flash / eager:.2f}"])
    header = ["pictures", "tokens", "heads", "channels", "dtype", "PyTorch", "FlashAttention 4"]
    return [*header, "ratio"], lines
