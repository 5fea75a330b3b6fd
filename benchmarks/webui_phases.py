"""A WebUI that notes where a picture's seconds go: ``python -m benchmarks.webui_phases FILE …``.

After FILE come the launcher, such as ``launch.py``, and its arguments; it runs as Python would run
it. Functions of the host are timed from the moment their modules are imported. For each request of
the API a line of JSON is added to FILE, with the seconds of each phase. What runs within another
phase counts once, for the inner one. The GPU is waited for where a phase begins and ends, so a
picture takes a little longer than without.

``benchmarks.webui --breakdown FILE`` draws the pictures and reads the file.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.run_program import run_program

REQUEST, STEPS, SAMPLER = "rest of the request", "UNet", "sampler"
_SCRIPTS = tuple(
    f"ScriptRunner.{name}"
    for name in (
        *("before_process", "process", "before_process_batch", "after_extra_networks_activate"),
        *("process_batch", "process_before_every_sampling", "post_sample", "postprocess_batch"),
        *("postprocess_batch_list", "postprocess_image", "postprocess_maskoverlay"),
        *("postprocess_image_after_composite", "postprocess", "before_hr"),
    )
)
# By module: functions and methods, by phase. A host that lacks one has no such phase.
PHASES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "modules.api.api": {
        REQUEST: ("Api.text2imgapi", "Api.img2imgapi"),
        "PNG": ("encode_pil_to_base64", "decode_base64_to_image"),
    },
    "modules.processing": {
        "rest of the host": ("process_images_inner",),
        "text encoders": (
            "StableDiffusionProcessing.setup_conds",
            "StableDiffusionProcessingTxt2Img.setup_conds",
        ),
        "image to latents": ("StableDiffusionProcessingImg2Img.init",),
        SAMPLER: (
            "StableDiffusionProcessingTxt2Img.sample",
            "StableDiffusionProcessingImg2Img.sample",
        ),
        "VAE": ("decode_latent_batch",),
    },
    "modules.devices": {"freeing memory": ("torch_gc",)},
    "modules.scripts": {"scripts": _SCRIPTS},
    "modules.shared_state": {"previews": ("State.set_current_image",)},
    "backend.memory_management": {"moving models": ("load_models_gpu", "free_memory")},
    "ldm_patched.modules.model_management": {"moving models": ("load_models_gpu", "free_memory")},
}


class Stopwatch:
    """Seconds of phases that lie within each other.

    Args:
        synchronize: Waits for the GPU.
        write: Gets the seconds by phase when the outermost phase has ended.
        clock: Returns seconds.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        write: Callable[[dict[str, float]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._synchronize, self._write, self._clock = synchronize, write, clock
        self._open: list[str] = []
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def add(self, phase: str, seconds: float, out_of: str) -> None:
        """Count seconds for a phase, and not for the one in which they were measured.

        Args:
            phase: Its name.
            seconds: How long it took.
            out_of: The phase that has these seconds too.
        """
        for name, change in ((phase, seconds), (out_of, -seconds)):
            self._seconds[name] = self._seconds.get(name, 0.0) + change

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is timed.

        Args:
            phase: What its time counts for.
            function: A function or a method's function.
        """

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._open and phase != REQUEST:
                return function(*args, **kwargs)  # no picture of the API
            self._note()
            self._open.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._note()
                self._open.pop()
                if not self._open:
                    seconds, self._seconds = self._seconds, {}
                    self._write(seconds)

        return timed

    def _note(self) -> None:
        """Count what has passed for the innermost phase."""
        self._synchronize()
        now = self._clock()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now


class UNetTimes:
    """The GPU's time in the forward of the host's UNet, from a pair of hooks.

    Args:
        stopwatch: Gets the seconds, out of the sampler's.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._marks: list[Any] = []

    def around(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """Return the sampler's function, with the UNet timed within.

        Args:
            sample: The host's method.
        """

        @functools.wraps(sample)
        def sampling(*args: Any, **kwargs: Any) -> Any:
            unet = _unet()
            if unet is not None and unet not in self._known:
                self._known.add(unet)
                unet.register_forward_pre_hook(self._mark)
                unet.register_forward_hook(self._mark)
            self._marks.clear()
            result = sample(*args, **kwargs)
            self._count()
            return result

        return sampling

    def _mark(self, *_: Any) -> None:
        import torch

        if torch.cuda.is_available():
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _count(self) -> None:
        import torch

        begins, ends = self._marks[::2], self._marks[1::2]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            seconds = sum(b.elapsed_time(e) for b, e in zip(begins, ends, strict=True)) / 1e3
        else:
            seconds = sum(e - b for b, e in zip(begins, ends, strict=True))
        self._stopwatch.add(STEPS, seconds, out_of=SAMPLER)


class TimingFinder(importlib.abc.MetaPathFinder):
    """Times functions of a module as soon as it has been imported.

    Args:
        stopwatch: Times them.
        phases: As `PHASES`.
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        phases: Mapping[str, Mapping[str, Sequence[str]]] = PHASES,
    ) -> None:
        self._stopwatch, self._phases = stopwatch, phases
        self._unet_times = UNetTimes(stopwatch)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module as Python does; one that has phases is changed after its import."""
        if fullname not in self._phases:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.time_functions(module)

        loader.exec_module = exec_module
        return spec

    def time_functions(self, module: ModuleType) -> None:
        """Put timed functions in the place of a module's.

        Args:
            module: One of those with phases.
        """
        for phase, names in self._phases[module.__name__].items():
            for name in names:
                *owners, last = name.split(".")
                owner: Any = module
                for part in owners:
                    owner = getattr(owner, part, None)
                function = vars(owner).get(last) if owner is not None else None
                if function is None:
                    continue
                if phase == SAMPLER:
                    function = self._unet_times.around(function)
                setattr(owner, last, self._stopwatch.timed(phase, function))


def main() -> None:
    """Run a WebUI's launcher."""
    path = Path(sys.argv[1]).absolute()

    def write(seconds: dict[str, float]) -> None:
        with path.open("a", encoding="utf-8") as file:
            print(json.dumps({name: round(s, 5) for name, s in seconds.items()}), file=file)

    sys.meta_path.insert(0, TimingFinder(Stopwatch(_synchronize, write)))
    run_program(sys.argv[2:])


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def _unet() -> Any:
    """The UNet that the host draws with, or None."""
    model = getattr(sys.modules.get("modules.shared"), "sd_model", None)
    objects = getattr(model, "forge_objects", None)
    holder = model if objects is None else getattr(objects.unet, "model", None)
    inner = getattr(holder, "model", holder) if objects is None else holder
    return getattr(inner, "diffusion_model", None)


if __name__ == "__main__":
    main()
