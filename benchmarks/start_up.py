"""The first pictures on a new machine and after a restart: ``python -m benchmarks.start_up``.

A picture is 20 UNet steps with CFG and a VAE decode, with a model of full width and random
weights. Three processes draw: one eager, one with an initially empty store, and one with the store
that the second filled. Each process measures from its own start. First pictures vary by half a
second, also in eager, so further processes draw one each in turn, and figures of first pictures
are medians. Two last processes warm up 12 sizes; the second, with a filled store, is measured.

"plain" draws like the process with an empty store, by calls of a pipeline that was only compiled:
nothing names the checkpoint or says where a picture begins.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.results import write_result

_STARTED = time.time() - float(os.environ.get("ONEDIFF_BENCH_AGE_S", "0"))
CONTENDERS = {
    "eager": "eager",
    "cold": "ours-empty-store",
    "warm": "ours-filled-store",
    "plain": "plain",
}
WARM_UP = "sizes"
SIZES = ((1024, 1024), (960, 720), (512, 512), (896, 768), (720, 720))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("tiny", "small", "sd1", "sdxl"), default="small")
    parser.add_argument("--device", default=None, help="cuda where there is one")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pictures", type=int, default=60, help="at most, in the second process")
    parser.add_argument("--scale", type=int, default=1, help="divide sizes by it")
    parser.add_argument("--repeats", type=int, default=3, help="of each first picture")
    parser.add_argument("--only-first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=(*CONTENDERS, WARM_UP))
    parser.add_argument("--store", type=Path)
    parser.add_argument("--verbose", action="store_true", help="log to standard error")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.verbose:
        logging.basicConfig(format="%(relativeCreated)d %(name)s %(message)s")
        logging.getLogger("onediff_ext").setLevel(logging.DEBUG)
    if arguments.role:
        print(json.dumps(_draw(arguments)))
        return 0
    with tempfile.TemporaryDirectory(prefix="onediff-bench-") as folder:
        arguments.store = arguments.store or Path(folder) / "store"
        stores = {"plain": Path(folder) / "plain"}
        found = {role: _run(role, arguments, store=stores.get(role)) for role in CONTENDERS}
        firsts = {role: [run["rows"][0]] for role, run in found.items()}
        for repeat in range(1, arguments.repeats):
            for role in CONTENDERS:
                is_empty = role in ("cold", "plain")
                store = Path(folder) / f"{role}-{repeat}" if is_empty else arguments.store
                run = _run(role, arguments, store=store, only_first=True)
                firsts[role].append(run["rows"][0])
        figures = summary(found, firsts, arguments.model, arguments.steps)
        if arguments.json is not None:
            write_result(arguments.json, figures)  # the rest takes another minute
        _run(WARM_UP, arguments)  # builds the VAE's encoder, which no picture needed
        figures |= warm_up_figures(_run(WARM_UP, arguments)["warm_up"])
    hidden = ("rows", "contenders", "fingerprint", "warm_up")
    shown = {key: value for key, value in figures.items() if key not in hidden}
    print(json.dumps(shown, indent=1))
    if arguments.json is not None:
        write_result(arguments.json, figures)
    return 0


def _run(
    role: str,
    arguments: argparse.Namespace,
    *,
    store: Path | None = None,
    only_first: bool = False,
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.start_up", "--role", role]
    command += ["--store", str(store or arguments.store)]
    for name in ("model", "device", "dtype", "steps", "pictures", "scale"):
        value = getattr(arguments, name)
        if value is not None:
            command += [f"--{name}", str(value)]
    command += ["--verbose"] if arguments.verbose else []
    command += ["--only-first"] if only_first else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _draw(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw the pictures of one process; return their sizes and seconds."""
    import torch

    from benchmarks.fingerprint import fingerprint
    from benchmarks.models import DTYPES, make_unet, make_vae
    from benchmarks.pipeline import SIZES as WARM_UP_SIZES
    from benchmarks.timing import synchronize
    from onediff_ext.core.options import CompileOptions
    from onediff_ext.core.shapes import BatchShape, parse_sizes
    from onediff_ext.hosts.diffusers.compile import (
        compile_pipe,
        compiled_state,
        new_session,
        one_picture,
    )
    from onediff_ext.hosts.diffusers.warmup import pipe_warm_up

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[arguments.dtype or ("fp16" if device.type == "cuda" else "fp32")]
    session = None
    if arguments.role not in ("eager", "plain"):
        session = new_session(CompileOptions(store=arguments.store))
        identity = hashlib.sha256(arguments.model.encode()).hexdigest()
        session.use_checkpoint(identity, name=arguments.model, device=device)
    pipe = Pipe(
        make_unet(arguments.model, device, dtype).to(memory_format=torch.channels_last),
        make_vae(arguments.model, device, dtype),
    )
    if arguments.role == "plain":
        compile_pipe(pipe, options={"store": arguments.store})
        state = compiled_state(pipe)
        assert state is not None
        session = state.session
    elif session is not None:
        compile_pipe(pipe, session=session)
    sizes = [(w // arguments.scale, h // arguments.scale) for w, h in SIZES]
    rows: list[dict[str, Any]] = []

    def draw(size: tuple[int, int]) -> None:
        start = time.time()
        synchronize(device)
        with nullcontext() if arguments.role == "plain" else one_picture(pipe):
            pipe(size, arguments.steps)
        now = time.time()
        status = session.status() if session is not None else None
        rows.append({
            "width": size[0], "height": size[1], "seconds": now - start,
            "since_start_s": now - _STARTED,
            "running": status.running if status else "eager",
            "kinds_ready": status.kinds_ready if status else 0,
            "kinds_needed": status.kinds_needed if status else 0,
        })  # fmt: skip

    warm_up = None
    if arguments.role == WARM_UP:
        shapes = [
            BatchShape(
                width_px=w // arguments.scale // 8 * 8, height_px=h // arguments.scale // 8 * 8
            )
            for w, h in ((s.width_px, s.height_px) for s in parse_sizes(WARM_UP_SIZES))
        ]
        warm_up = pipe_warm_up(pipe, shapes).run().as_json()
        sizes = []
    elif arguments.only_first:
        draw(sizes[0])
        sizes = []
    elif arguments.role in ("cold", "plain"):
        for _ in range(arguments.pictures):
            draw(sizes[0])
            if rows[-1]["kinds_needed"] and rows[-1]["kinds_ready"] == rows[-1]["kinds_needed"]:
                break
    for size in sizes:
        for _ in range(4):
            draw(size)
    found: dict[str, Any] = {
        "fingerprint": fingerprint(device),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "warm_up": warm_up,
    }
    if session is not None:
        found |= {"built": session.count("built"), "loaded": session.count("loaded")}
        found["fallbacks"] = [vars(f) for f in session.fallbacks()]
        session.close()
    return found


class Pipe:
    """A pipeline without text encoders: UNet steps with CFG, and a VAE decode."""

    def __init__(self, unet: Any, vae: Any) -> None:
        self.unet, self.vae = unet, vae

    def __call__(self, size: tuple[int, int], steps: int) -> None:
        import torch

        from benchmarks.timing import synchronize
        from onediff_ext.hosts.diffusers.probe import unet_inputs

        device, (width, height) = self.unet.device, size
        inputs = unet_inputs(
            self.unet, torch.Generator().manual_seed(0),
            height_latent=height // 8, width_latent=width // 8,
        )  # fmt: skip
        with torch.no_grad():
            for timestep in torch.linspace(900, 100, steps, device=device):
                noise = self.unet(**{**inputs, "timestep": timestep}).sample
                inputs["sample"] = inputs["sample"] - 0.01 * noise
            self.vae.decode(inputs["sample"][:1].to(self.vae.dtype))
        synchronize(device)


def warm_up_figures(warm_up: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a warm-up for the JSON file.

    Args:
        warm_up: Its report.
    """
    return {
        "warm_up_s": warm_up["seconds"],
        "warm_up_sizes": len(warm_up["sizes"]),
        "warm_up_built": warm_up["built"],
        "warm_up": warm_up,
    }


def summary(
    found: dict[str, Any],
    firsts: dict[str, list[dict[str, Any]]],
    model: str,
    steps: int,
) -> dict[str, Any]:
    """Combine the figures of all processes for the JSON file.

    Args:
        found: "eager", "cold" and "warm" → result of `_draw`.
        firsts: For each of them, the first pictures of several processes.
        model: Name of the model.
        steps: UNet steps of a picture.
    """
    eager, cold, warm = (found[role]["rows"] for role in ("eager", "cold", "warm"))
    contenders = {role: name for role, name in CONTENDERS.items() if role in found}

    def all_ready_s(rows: list[dict[str, Any]]) -> float | None:
        """Return seconds from the beginning of the first picture until all graphs are in use."""
        ready = next((row for row in rows if 0 < row["kinds_needed"] == row["kinds_ready"]), None)
        if ready is None:
            return None
        return float(ready["since_start_s"] - rows[0]["since_start_s"] + rows[0]["seconds"])

    def of_size(rows: list[dict[str, Any]], row: dict[str, Any]) -> list[float]:
        size = (row["width"], row["height"])
        return [r["seconds"] for r in rows if (r["width"], r["height"]) == size]

    def new_sizes(rows: list[dict[str, Any]]) -> list[float]:
        """Return first minus last picture's seconds for each size after the first."""
        seconds = [of_size(rows, row) for row in eager[4::4]]
        return [one[0] - one[-1] for one in seconds]

    def longest_ratio(rows: list[dict[str, Any]]) -> float:
        return max(float(row["seconds"]) / max(of_size(eager, row)[1:]) for row in rows[1:])

    def first(role: str, key: str = "seconds") -> float:
        return statistics.median(float(row[key]) for row in firsts[role])

    return {
        "what": "first pictures",
        "model": model,
        "dtype": found["cold"]["dtype"],
        "steps": steps,
        "fingerprint": found["cold"]["fingerprint"],
        "first_picture_s": first("cold"),
        "first_picture_eager_s": first("eager"),
        "first_picture_ratio": first("cold") / first("eager"),
        "longest_ratio": longest_ratio(cold),
        "all_kinds_ready_s": all_ready_s(cold),
        "plain": {
            "first_picture_s": first("plain"),
            "longest_ratio": longest_ratio(found["plain"]["rows"]),
            "all_kinds_ready_s": all_ready_s(found["plain"]["rows"]),
        } if "plain" in found else None,
        "built": found["cold"]["built"],
        "restart_first_picture_s": first("warm", "since_start_s"),
        "restart_first_picture_running": warm[0]["running"],
        "eager_start_first_picture_s": first("eager", "since_start_s"),
        "restart_over_eager_start_s": (
            first("warm", "since_start_s") - first("eager", "since_start_s")
        ),
        "new_size_costs_s": max(new_sizes(warm)),
        "new_size_costs_eager_s": max(new_sizes(eager)),
        "first_pictures": {
            contenders[role]: [
                {key: row[key] for key in ("seconds", "since_start_s")} for row in rows
            ]
            for role, rows in firsts.items()
        },
        "steady": [
            {
                "width": row["width"],
                "height": row["height"],
                "eager_s": min(of_size(eager, row)),
                "ours_s": min(of_size(warm, row)),
            }
            for row in eager[::4]
        ],
        "contenders": {
            name: {
                key: value
                for key, value in found[role].items()
                if key not in ("rows", "fingerprint", "warm_up")
            }
            for role, name in contenders.items()
        },
        "rows": [
            {"contender": name, "dtype": found[role]["dtype"], **row}
            for role, name in contenders.items()
            for row in found[role]["rows"]
        ],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
