"""A folder of the tab "Batch" on several GPUs: the command line's own run, in a process beside.

The page holds one GPU's models in its own process. A worker on each GPU is what `onediff-ext
img2img --gpus` starts, so the page runs that command and shows its progress.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from onediff_ext.core.child_processes import wait_or_kill
from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.hosts.diffusers.jobs.img2img_job import Img2ImgJob
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.gpu_choices import ALL
from onediff_ext.pictures.skipped import SkipReport
from onediff_ext.standalone.app import StandaloneApp
from onediff_ext.standalone.folder_progress import FolderProgress, plan_folder

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_END_S = 30.0  # workers finish what they write; then Ray ends


def off_reason() -> str | None:
    """Return why several GPUs cannot be used; None when they can."""
    if importlib.util.find_spec("ray") is None:
        return 'Several GPUs need Ray. Install it: pip install "onediff-ext[cluster]"'
    return None


def run_folder_on_gpus(
    standalone_app: StandaloneApp, choices: Choices, job: Img2ImgJob, gpus: str
) -> Iterator[FolderProgress]:
    """Run a job on several GPUs and yield its progress.

    Args:
        standalone_app: Its turn is held, so its own jobs wait; `cancel` ends the run.
        choices: From the panel.
        job: What to do.
        gpus: From `gpu_choices`.

    Raises:
        OneDiffError: A setting cannot be used, the run failed, or the user cancelled. Written
            results stay, and the same job goes on there.
    """
    command = img2img_command(standalone_app, choices, job, gpus)
    plan, progress = plan_folder(job, SkipReport())
    if not plan.todo:
        yield progress
        return
    events: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            with standalone_app.turn():
                _follow(standalone_app, command, events)
        except BaseException as exc:
            events.put(exc)
        events.put(None)

    progress.note = "starting the workers"
    yield progress
    threading.Thread(target=work, name="onediff-folder", daemon=True).start()
    while (event := events.get()) is not None:
        if isinstance(event, BaseException):
            raise event
        progress = _advanced(progress, event)
        yield progress


def img2img_command(
    standalone_app: StandaloneApp, choices: Choices, job: Img2ImgJob, gpus: str
) -> list[str]:
    """Return the arguments of ``onediff-ext`` that do the same job on several GPUs.

    Raises:
        OptionError: A choice of the panel has no option of the command line.
    """
    if choices.enabled and not choices.captures:
        raise OptionError(
            "Several GPUs draw with CUDA graphs.", "Switch them on in the panel, or choose 1 GPU."
        )
    batch, settings, options = job.batch, job.settings, standalone_app.options
    named: dict[str, object] = {
        "output": batch.output_dir.absolute(),
        "model": standalone_app.loaded().checkpoint.path.absolute(),
        "gpus": "all" if gpus == ALL else gpus,
        "size": batch.size_rule,
        "batch-size": batch.batch_size,
        "max-megapixels": batch.max_megapixels,
        "name": batch.name_template.text,
        "seed": batch.seed,
        "prompt": settings.prompt,
        "negative-prompt": settings.negative_prompt,
        "steps": settings.steps,
        "guidance": settings.guidance,
        "strength": settings.strength,
        "scheduler": settings.scheduler,
        "deepcache": settings.deepcache,
        "step-cache": settings.step_cache,
        "guidance-steps": settings.guidance_steps,
        "dtype": standalone_app.dtype_name,
        "vae-tiling": standalone_app.vae_tiling,
    }
    flags = {
        "recursive": batch.recursive,
        "captions": batch.captions,
        "vary-seed": batch.vary_seed,
        "keep-alpha": batch.keep_alpha,
        "eager": not choices.enabled,
        "progress-json": True,
    }
    if standalone_app.device.type == "cpu":
        named["device"] = "cpu"
    if options.store is not None:
        named["store"] = options.store.absolute()
    if choices.enabled:
        named |= {
            "backend": choices.backend,
            "precision": choices.precision,
            "build": options.build,
            "store-limit-gb": options.store_limit_bytes / 2**30,
        }
        if options.workers is not None:
            named["workers"] = options.workers
    words = [f"--{name}={value}" for name, value in named.items()]
    words += [f"--lora={path.absolute()}:{weight!r}" for path, weight in standalone_app.loras]
    if choices.enabled:
        words += [f"--ignore={name}" for name in sorted(choices.ignores)]
    words += [f"--{name}" for name, is_on in flags.items() if is_on]
    return ["img2img", *words, *(str(path.absolute()) for path in batch.inputs)]


def _follow(
    standalone_app: StandaloneApp,
    command: list[str],
    events: queue.SimpleQueue[dict[str, Any] | BaseException | None],
) -> None:
    """Run a command; its lines of JSON and its report go to `events`."""
    with tempfile.TemporaryDirectory(prefix="onediff-page-") as folder:
        report, said = Path(folder) / "report.json", Path(folder) / "said.txt"
        with said.open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "onediff_ext", *command, f"--report={report}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                # Redirected, Windows' Python would write in a code page.
                env={**os.environ, "PYTHONIOENCODING": "utf-8:backslashreplace"},
            )
            assert process.stdout is not None
            reader = threading.Thread(
                target=_read_lines, args=(process.stdout, events), daemon=True
            )
            reader.start()
            try:
                while process.poll() is None:
                    standalone_app.check_cancelled()
                    try:
                        process.wait(_LOOK_S)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                _end(process)
                reader.join()
        if report.exists():
            events.put(json.loads(report.read_text(encoding="utf-8")))
        if process.returncode not in (0, 1):  # 1: some pictures failed
            raise _error_of(said.read_text(encoding="utf-8", errors="replace"))


def _read_lines(
    lines: IO[str], events: queue.SimpleQueue[dict[str, Any] | BaseException | None]
) -> None:
    for line in lines:
        if line.startswith("{"):
            events.put(json.loads(line))


def _end(process: subprocess.Popen[str]) -> None:
    """End a command as Ctrl-C does: what is written stays, and Ray ends with its workers."""
    if process.poll() is not None:
        return
    process.terminate()
    wait_or_kill(process, _END_S)


def _error_of(said: str) -> OneDiffError:
    """Return the error that a command printed as its last lines."""
    lines = [line for line in said.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("onediff-ext: "):
            hint = lines[number + 1].strip() if number + 1 < len(lines) else ""
            return OneDiffError(line.removeprefix("onediff-ext: "), hint)
    logger.warning("The run on several GPUs failed: %s", "\n".join(lines[-20:]))
    return OneDiffError("The run on several GPUs failed.", "Its log says why, or choose 1 GPU.")


def _advanced(progress: FolderProgress, told: dict[str, Any]) -> FolderProgress:
    """Return the progress after a line of JSON, or after the report."""
    if "pictures" in told:
        failures = [f"{entry['input']}: {entry['reason']}" for entry in told["skipped"]]
        return replace(progress, skipped=failures)
    return replace(
        progress,
        done=told["done"],
        note=told["note"] or progress.note,
        paths=[*progress.paths, *map(Path, told["paths"])],
        titles=told["titles"],
        workers=told["workers"],
    )
