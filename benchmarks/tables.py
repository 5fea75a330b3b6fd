"""Write the tables of README and docs from the result files.

``python -m benchmarks.tables [--check]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cfg_table import SIZES as CFG_SIZES
from benchmarks.cfg_table import cfg_parallel
from benchmarks.flash_table import flash_kernels, flash_models
from benchmarks.guidance_table import guidance_rows
from benchmarks.neo_table import neo_compile_table
from benchmarks.phases_table import phases_table
from benchmarks.plain_rows import as_used, beside_unet
from benchmarks.results import read_result
from benchmarks.small_gpu_table import MODELS, WEBUIS, small_gpu_table
from benchmarks.webui_gpus_table import webui_gpus

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = ROOT / "benchmarks" / "plain_script.py"
PAGES = (
    *("README.md", "docs/benchmarks.md", "docs/cluster.md", "docs/guidance.md"),
    *("docs/hosts-neo.md", "docs/small-gpus.md"),
)
BEGIN, END = "<!-- figures: {} -->", "<!-- end -->"
SIZES = (
    *((512, 512), (720, 720), (896, 768), (960, 720), (1024, 1024), (1280, 1280), (2048, 512)),
    (1536, 1024),
)
TRANSFORMER_SIZES = (
    *((512, 512), (768, 768), (720, 960), (960, 720), (1280, 768), (832, 1216), (1024, 1024)),
    (1536, 1024),
)
FLASH_MODELS = ("flux", "sd35-medium", "sd35-large", "z-image")
FLASH_UNETS = ("sdxl", "sd1")
TRANSFORMERS = ("flux", "sd35-medium", "sd35-large", "z-image", "qwen-image")
COLUMNS = {
    "eager": "eager",
    "ours-captured-eager": "eager, captured",
    "compile_repeated_blocks as shown": "repeated blocks",
    "compile_repeated_blocks": "repeated blocks, dynamic",
    "compile_repeated_blocks captured": "repeated blocks, captured",
    "torch.compile dynamic": "compile, dynamic",
    "torch.compile": "compile",
    "torch.compile reduce-overhead": "compile, captured",
    "torch.compile max-autotune": "compile, max-autotune",
    "stable-fast": "stable-fast",
    "torch-tensorrt": "torch-tensorrt",
    "ours-exact": "OneDiff",
    "ours-exact announced": "OneDiff, announced",
    "ours-fp8": "OneDiff, fp8",
    "ours-fp8 announced": "OneDiff, fp8, announced",
}
# Those of the README's one table.
SHORT_COLUMNS = (
    *("eager", "ours-captured-eager", "torch.compile", "ours-exact", "ours-exact announced"),
    *("ours-fp8", "ours-fp8 announced"),
)
PIPELINE_NAMES = {
    "eager": "diffusers, eager",
    "ours-empty-store": "OneDiff, empty store",
    "ours-filled-store": "OneDiff, filled store",
    "plain": "diffusers with compile_pipe, filled store",
}

SMALL_GPU_RUNS = (
    *("a1111-sd15-4gb", "neo-sdxl-6gb", "forge-sdxl-6gb", "a1111-sdxl-8gb", "neo-sdxl-8gb"),
    *("forge-sdxl-8gb", "diffusers-sdxl-8gb", "neo-sdxl-12gb-hires", "forge-sdxl-12gb-hires"),
)
PHASES_RUNS = ("a1111-sdxl-h100", "a1111-sdxl-h200", "forge-sdxl-h100", "neo-sdxl-h100")

Figures = dict[str, Any]


class NotMeasured(Exception):  # noqa: N818
    """A result file is missing."""


def main(check: bool = False) -> int:
    """Write the tables of all `PAGES`.

    Args:
        check: Write nothing.

    Returns:
        Exit status: 1 when `check` finds a page that is out of date, else 0.
    """
    stale = 0
    for page in PAGES:
        before = (ROOT / page).read_text(encoding="utf-8")
        after = with_tables(before, RESULTS)
        if check:
            stale |= after != before
        else:
            (ROOT / page).write_text(after, encoding="utf-8")
    return int(stale)


def with_tables(text: str, results: Path) -> str:
    """Return the text with new marked sections; a section without figures becomes empty.

    Args:
        text: With ``<!-- figures: NAME -->`` and ``<!-- end -->`` around each section.
        results: Folder of result files.
    """

    def result(name: str) -> Figures:
        figures = read_result(results / f"{name}.json")
        if figures is None:
            raise NotMeasured(name)
        return figures

    def dit_table(model: str) -> str:
        figures = result(f"dit-{model}-h200")
        return forward_table(figures, "bfloat16", sizes=TRANSFORMER_SIZES)

    def steps_of_a_script(model: str) -> str:
        files = (result(f"{each}-{model}-h100") for each in ("plain-sizes", "plain-loop", "unet"))
        return _table(*beside_unet(*files))

    sections: dict[str, Callable[[], str]] = {
        "a user's script": lambda: f"```python\n{SCRIPT.read_text(encoding='utf-8')}```",
        "unet sdxl short": lambda: forward_table(result("unet-sdxl-h200"), columns=SHORT_COLUMNS),
        "unet sdxl": lambda: forward_table(result("unet-sdxl-h200")),
        "unet sd1": lambda: forward_table(result("unet-sd1-h200")),
        "unet sdxl bf16": lambda: forward_table(result("unet-sdxl-h200"), "bfloat16"),
        "unet sdxl first": lambda: first_steps(result("unet-sdxl-h200")),
        "unet sd1 first": lambda: first_steps(result("unet-sd1-h200")),
        **{f"dit {model}": partial(dit_table, model) for model in TRANSFORMERS},
        "flash models": lambda: _table(
            *flash_models([result(f"dit-{model}-flash-h200") for model in FLASH_MODELS])
        ),
        "flash unets": lambda: _table(
            *flash_models([result(f"unet-{model}-flash-h200") for model in FLASH_UNETS])
        ),
        "cfg parallel": lambda: _table(
            *cfg_parallel([result(f"cfg-parallel-sdxl-{size}-h200x2") for size in CFG_SIZES])
        ),
        "flash kernels": lambda: _table(*flash_kernels(result("kernels-attention-h200"))),
        "vae": lambda: vae_table(result("vae-sdxl-h200")),
        "vae encode": lambda: vae_table(result("vae-sdxl-h200"), "encode"),
        "pipeline sdxl": lambda: pipeline_table(result("pipeline-sdxl-h200")),
        "pipeline sd15": lambda: pipeline_table(result("pipeline-sd15-h200")),
        "start-up": lambda: start_up_table(result("start-up-sdxl-h200")),
        "plain first": lambda: plain_first_table(result("plain-sdxl-h200")),
        "plain sizes": lambda: steps_of_a_script("sdxl"),
        "plain sizes sd1": lambda: steps_of_a_script("sd1"),
        "never wait": lambda: never_wait_table(result("never-wait-onediff-demo-cpu")),
        "kernels": lambda: kernel_table(result("kernels-h200")),
        "deepcache": lambda: deepcache_table(
            [result("deepcache-sdxl-h200"), result("deepcache-sd15-h200")]
        ),
        "guidance steps": lambda: _table(*guidance_rows(result("guidance-demo-cpu"))),
        "throughput": lambda: throughput_table(result("throughput-sdxl-h100")),
        "throughput h200": lambda: throughput_table(result("throughput-sdxl-h200")),
        "webui": lambda: webui_table(
            [result(f"webui-{run}-h200") for run in ("a1111-sd1", "forge-sdxl", "reforge-sdxl")]
        ),
        "neo compile sdxl": lambda: neo_compile_table(result("neo-compile-sdxl-h200")),
        "neo compile sdxl lora": lambda: neo_compile_table(result("neo-compile-sdxl-lora-h200")),
        "neo compile flux": lambda: neo_compile_table(result("neo-compile-flux-h100")),
        "neo compile sd15": lambda: neo_compile_table(result("neo-compile-sd15-h200")),
        "neo compile sd15 at once": lambda: neo_compile_table(
            result("neo-compile-sd15-at-once-h200")
        ),
        "neo compile sd15 max-autotune": lambda: neo_compile_table(
            result("neo-compile-sd15-max-autotune-h200")
        ),
        "webui phases": lambda: phases_table(
            [result(f"webui-phases-{run}") for run in PHASES_RUNS]
        ),
        "webui gpus": lambda: _table(*webui_gpus(result("webui-gpus-sdxl-h200x2"))),
        "small gpu": lambda: small_gpu_table(
            [result(f"small-gpu-{run}-h100") for run in SMALL_GPU_RUNS]
        ),
        "one set of graphs": lambda: one_set_table(
            [result("any-size-sdxl-h200"), result("any-size-sd1-h200")]
        ),
    }
    for name, make in sections.items():
        begin = BEGIN.format(name)
        if begin not in text:
            continue
        head, rest = text.split(begin, 1)
        _, tail = rest.split(END, 1)
        try:
            made = f"\n{make()}"
        except NotMeasured:
            made = ""
        text = f"{head}{begin}{made}\n{END}{tail}"
    return text


def forward_table(
    figures: Figures,
    dtype: str = "float16",
    columns: Collection[str] = tuple(COLUMNS),
    sizes: Collection[tuple[int, int]] = SIZES,
) -> str:
    """Milliseconds of a forward by size, and how many times faster than eager OneDiff is.

    Args:
        figures: A result file of `benchmarks.unet` or `benchmarks.dit`.
        dtype: Rows of this dtype.
        columns: Contenders, each a column when it was measured.
        sizes: Width and height in pixels, each a line when it was measured.
    """
    rows = [row for row in figures["rows"] if row["dtype"] == dtype and "ms_median" in row]
    if not rows:
        raise NotMeasured(dtype)
    rows = as_used(rows)
    ms = {(r["contender"], r["width"], r["height"]): r["ms_median"] for r in rows}
    titles = {
        name: title
        for name, title in COLUMNS.items()
        if name in columns and any(key[0] == name for key in ms)
    }
    lines = []
    measured = dict.fromkeys((row["width"], row["height"]) for row in rows)
    for width, height in [size for size in sizes if size in measured]:
        of_size = {name: ms.get((name, width, height)) for name in titles}
        eager, ours = of_size.get("eager"), of_size.get("ours-exact")
        gain = f"{eager / ours:.1f}" if eager and ours else "-"
        cells = ["-" if value is None else f"{value:.1f}" for value in of_size.values()]
        lines.append([f"{width}x{height}", *cells, gain])
    return _table(["size", *titles.values(), "times faster"], lines)


def first_steps(figures: Figures, dtype: str = "float16") -> str:
    """How long each contender makes the user wait, and contenders without figures."""
    lines, left_out = [], []
    # Older rows come from contenders that shared a process and its compiled code.
    measured = [r for r in figures["rows"] if r["dtype"] == dtype and "measured" in r]
    if not measured:
        raise NotMeasured(dtype)
    for name, title in COLUMNS.items():
        found = figures.get("contenders", {}).get(name, {})
        rows = [r for r in measured if r["contender"] == name]
        first = [row["first_s"] for row in rows if "first_s" in row]
        if "not_installed" in found:
            left_out.append(f"{title} is not installed there ({found['not_installed']})")
        for row in rows:
            reason = row.get("failed", row.get("stopped"))
            if reason:
                left_out.append(f"{title} at {row['width']}x{row['height']}: {reason}")
        if first and name != "eager":
            start = found.get("ready_s", first[0])
            later = max(first[1:], default=None)
            lines.append([
                title, f"{start:.1f}", "-" if later is None else f"{later:.2f}", len(first),
            ])  # fmt: skip
    intro = (
        "How long each keeps one waiting, with no cache of earlier runs: before its first step, and"
        " at the slowest of the other sizes. In use nobody waits for OneDiff's graphs: they are"
        " built beside the pictures."
    )
    table = _table(["", "first step, s", "another size, s", "sizes measured"], lines)
    end = f"\n\nWithout figures: {'; '.join(left_out)}." if left_out else ""
    return f"{intro}\n\n{table}{end}"


def vae_table(figures: Figures, part: str = "decode", dtype: str = "bfloat16") -> str:
    """Milliseconds of the VAE for one picture."""
    rows = [r for r in figures["rows"] if r.get("part", "decode") == part and r["dtype"] == dtype]
    if not rows:
        raise NotMeasured(part)
    rows = as_used(rows)
    ms = {(r["contender"], r["width"], r["height"]): r["ms_median"] for r in rows}
    lines = []
    for name, width, height in ms:
        if name == "eager":
            before, after = ms[name, width, height], ms["ours-exact", width, height]
            size = f"{width}x{height}"
            lines.append([size, f"{before:.1f}", f"{after:.1f}", f"{before / after:.1f}"])
    return _table(["size", "eager", "OneDiff", "times faster"], lines)


def pipeline_table(figures: Figures) -> str:
    """Pictures per minute of whole processes."""
    lines = []
    for name, found in figures["contenders"].items():
        known = next((n for n in PIPELINE_NAMES if name == n or name.startswith(f"{n} ")), None)
        if known is None:
            continue
        title = ", ".join([PIPELINE_NAMES[known], *name.removeprefix(known).split()])
        ratio, without = found.get("ratio"), found.get("ratio_without_start_up")
        lines.append([
            title, f"{found['start_up_s']:.1f}", f"{found['pictures_per_minute']:.1f}",
            "1.0" if name == "eager" else _or_dash(ratio),
            "1.0" if name == "eager" else _or_dash(without),
        ])  # fmt: skip
    sizes = len({(row["width"], row["height"]) for row in figures["rows"]})
    batch = figures["batch_size"]
    intro = (
        f"{_title(figures)}, image to image from the command line:"
        f" {figures['pictures']} pictures of {sizes} sizes, {figures['unet_steps']} UNet steps"
        f" each, {'one' if batch == 1 else batch} at a time; whole processes from start to end,"
        " imports and loading of the model included (`python -m benchmarks.pipeline`):"
    )
    header = ["", "start-up, s", "pictures a minute", "times faster", "start-up left out"]
    return f"{intro}\n\n{_table(header, lines)}"


def start_up_table(figures: Figures) -> str:
    """The first pictures of a new machine and of a restart."""
    seconds, times = "{:.1f}".format, "{:.2f}".format
    lines: list[list[Any]] = [
        ["eager: start to first picture, s", seconds(figures["eager_start_first_picture_s"])],
        ["restart: start to first picture, s", seconds(figures["restart_first_picture_s"])],
        ["a size's first picture over its later ones, s", times(figures["new_size_costs_s"])],
        ["the same, eager, s", times(figures["new_size_costs_eager_s"])],
        ["empty store: first picture, times eager's", times(figures["first_picture_ratio"])],
        ["empty store: slowest later one, times eager's", times(figures["longest_ratio"])],
        ["empty store: all kinds in use after, s", _or_dash(figures["all_kinds_ready_s"])],
    ]
    if plain := figures.get("plain"):
        lines += [
            ["the same by plain calls: slowest later one", times(plain["longest_ratio"])],
            ["the same: all kinds in use after, s", _or_dash(plain["all_kinds_ready_s"])],
        ]
    if "warm_up_s" in figures:
        label = f"filled store: warm-up of {figures['warm_up_sizes']} sizes, s"
        lines.append([label, seconds(figures["warm_up_s"])])
    intro = (
        "The first pictures on a new machine and after a restart, each a new process"
        f" (`python -m benchmarks.start_up`, pictures of {figures['steps']} steps):"
    )
    return f"{intro}\n\n" + _table(["", _title(figures)], lines)


def plain_first_table(figures: Figures) -> str:
    """The pictures that a user's script draws without a pause, with an empty store."""
    seconds, eager = "{:.1f}".format, figures["contenders"]["eager"]
    names = {"plain": "exact", "plain-fp8": "fp8", "plain-lora": "with a LoRA"}
    chosen = {k: found for k in names if (found := figures["contenders"].get(k))}
    usual_s = eager["usual_picture_s"]

    def line(label: str, of: Callable[[Figures], str]) -> list[Any]:
        return [label, *map(of, chosen.values())]

    lines = [
        line("graphs built", lambda found: str(found["graphs_built"])),
        line("all built and loaded after, s", lambda found: seconds(found["all_built_s"])),
        line("slowest picture but the first, s", lambda f: seconds(f["slowest_later_picture_s"])),
        line(
            "the same, times eager's usual picture",
            lambda found: f"{found['slowest_later_picture_s'] / usual_s:.2f}",
        ),
        line("eager's usual picture, s", lambda _: seconds(usual_s)),
        line("the last picture, s", lambda found: f"{found['last_picture_s']:.2f}"),
    ]
    intro = (
        "A user's script that draws 512x512 without a pause, with an empty store"
        f" (`python -m benchmarks.plain`, {figures['steps']} steps; times from the first picture's"
        " start):"
    )
    header = [_title(figures), *(names[name] for name in chosen)]
    return f"{intro}\n\n" + _table(header, lines)


def never_wait_table(figures: Figures) -> str:
    """Pictures drawn while graphs are built and faults happen."""
    lines = [
        ["pictures, sizes", f"{figures['pictures']}, {figures['sizes']}"],
        ["the slowest picture, times eager's at its size", f"{figures['longest_ratio']:.2f}"],
        ["the median picture", f"{figures['median_ratio']:.2f}"],
        ["kinds, all of them in use at picture",
         f"{figures['kinds_needed']}, {figures['kinds_ready_at_picture'] or 'after the last one'}"],
        ["pictures equal to eager's", f"{figures['pictures_equal_eager']}"],
        *([["by plain calls: the slowest, the median picture",
            "{longest_ratio:.2f}, {median_ratio:.2f}".format(**figures["plain"])]]
          if "plain" in figures else []),
        ["what went wrong meanwhile", "; ".join(figures["faults"])],
    ]  # fmt: skip
    intro = (
        "Nobody waits: pictures drawn on a CPU while graphs are built and things go wrong"
        " (`python -m benchmarks.never_wait`):"
    )
    return f"{intro}\n\n" + _table(["", figures["model"]], lines)


def kernel_table(figures: Figures, dtype: str = "float16") -> str:
    """Microseconds of our kernels and of Inductor's code for the same operation."""
    us: dict[tuple[str, str], dict[str, float]] = {}
    for row in figures["rows"]:
        if row["dtype"] == dtype:
            key = (row["kernel"], "x".join(map(str, row["shape"])))
            us.setdefault(key, {})[row["contender"]] = row["us_median"]
    lines = [
        [kernel, shape, *(f"{of[n]:.1f}" for n in ("eager", "inductor", "ours-triton"))]
        for (kernel, shape), of in us.items()
    ]
    return _table(["kernel", "shape", "eager", "Inductor", "OneDiff"], lines)


def deepcache_table(figures: list[Figures]) -> str:
    """Seconds of a picture of 50 steps, with and without DeepCache: SDXL and SD1.5."""
    lines = []
    for rows in zip(*map(_rows_of_plain_calls, figures), strict=True):
        cells = [c for row in rows for c in (f"{row['picture_s']:.2f}", f"{row['speedup']:.1f}")]
        lines.append([rows[0]["setting"], *cells])
    return _table(
        ["interval", "SDXL 1024x1024, s", "times faster", "SD1.5 512x512, s", "times faster"], lines
    )


def throughput_table(figures: Figures) -> str:
    """Pictures a second by the number of pictures in one call."""
    rows = {(row["contender"], row["batch"]): row for row in figures["rows"]}
    contenders = dict.fromkeys(contender for contender, _ in rows)
    lines = [
        [batch, *(f"{rows[c, batch]['pictures_per_s']:.2f}" for c in contenders)]
        for batch in dict.fromkeys(batch for _, batch in rows)
    ]
    names = [{"plain": "exact", "plain-fp8": "fp8"}.get(c, c) for c in contenders]
    return _table(["pictures in one call", *names], lines)


def _rows_of_plain_calls(figures: Figures) -> list[Figures]:
    rows: list[Figures] = figures["rows"]
    return [row for row in rows if row.get("contender") == "plain"] or rows


def webui_table(figures: list[Figures]) -> str:
    """Seconds of a picture in each WebUI, by itself and with OneDiff, at equal seeds."""
    lines = []
    for found in figures:
        eager = {_webui_job(row): row for row in found["rows"] if row["contender"] == "eager"}
        shown: set[tuple[Any, ...]] = set()
        for row in found["rows"]:
            job = _webui_job(row)[1:]
            # Only the first checkpoint, and its rows right after the warm-up.
            if row["contender"] != "ours-exact" or job in shown:
                continue
            if _webui_job(row) in eager:
                shown.add(job)
                task, width, height = job
                before, after = eager[_webui_job(row)]["seconds"], row["seconds"]
                lines.append([
                    f"{WEBUIS[found['host']]}, {MODELS[found['model']]}",
                    f"{task}, {width}x{height}", f"{before:.2f}", f"{after:.2f}",
                    f"{before / after:.1f}", f"{row['psnr_db']:.0f}",
                ])  # fmt: skip
    header = ["WebUI", "job", "by itself, s", "OneDiff, s", "times faster", "PSNR, dB"]
    return _table(header, lines)


def _webui_job(row: Figures) -> tuple[Any, ...]:
    return row["checkpoint"], row["task"], row["width"], row["height"]


def one_set_table(figures: list[Figures]) -> str:
    """The cost of building and loading graphs, and of new sizes: SDXL and SD1.5."""
    cells: list[tuple[str, Callable[[Figures], Any]]] = [
        ("graphs", lambda r: r["kinds"]),
        ("empty store: all built, s", lambda r: f"{r['ready_s']:.1f}"),
        ("new process: all loaded, s", lambda r: f"{r['second_process']['ready_s']:.1f}"),
        ("sizes drawn afterwards", lambda r: len(r["rows"])),
        ("recompiles for them", lambda r: r["recompiles"]),
        (
            "slowest first step at a new size, s",
            lambda r: f"{max(row['first_s'] for row in r['rows']):.2f}",
        ),
        ("largest difference to eager", lambda r: f"{r['largest_error']:.1e}"),
    ]
    lines = [[label, *(cell(found) for found in figures)] for label, cell in cells]
    return _table(["", "SDXL", "SD1.5"], lines)


def _title(figures: Figures) -> str:
    model = str(figures["model"])
    return MODELS.get(model, model)


def _table(header: list[str], lines: list[list[Any]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(
        "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in r) for r in rows
    )


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
