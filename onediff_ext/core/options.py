"""Compile options. Panel, command line and API all parse into this class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import check_names
from onediff_ext.core.step_cache_options import StepCacheOptions
from onediff_ext.core.typed_paths import given_path

COMPONENTS = ("unet", "transformer", "vae", "vae_encoder", "vae_decoder", "controlnet")
# Callers of the original OneDiff also ignore these.
_NEVER_COMPILED = ("text_encoder", "text_encoder_2", "text_encoder_3", "safety_checker")
BACKENDS = ("inductor", "oneflow", "eager")
PRECISIONS = ("exact", "fp8", "int8", "fp16-accumulation")
BUILD_POLICIES = ("background", "wait", "never")
TUNING_POLICIES = ("off", "idle")
_OPTIONAL_NUMBERS = ("workers", "capture_limit_bytes")
_NUMBERS = (
    *_OPTIONAL_NUMBERS, "store_limit_bytes", "build_timeout_s", "build_attempts", "capture_limit",
)  # fmt: skip
_SWITCHES = ("channels_last", "captures", "spot_checks")
_DEVICE = re.compile(r"off|auto|cpu|cuda:\d+")


@dataclass(frozen=True)
class CompileOptions:
    """Options of one session.

    Args:
        backend: Name of the backend that builds graphs, one of `BACKENDS`.
        build: What happens when a kind has no graph yet. ``"background"`` draws eager
            and builds in the background, ``"wait"`` builds after the first forward that
            needs it, ``"never"`` leaves it eager.
        precision: ``"exact"`` computes as the host does. With ``"fp8"`` and ``"int8"`` the linear
            layers of transformer blocks multiply in 8 bits: faster on GPUs that support it, and
            visible in pictures. ``"fp16-accumulation"`` sums float16 products in float16; it is
            meant for GeForce GPUs, and was not measured on one.
        store: Folder of the graph store; None means $ONEDIFF_STORE, else the user's cache
            folder.
        store_limit_bytes: Above this size the least recently used graphs are deleted.
        workers: Processes that build at the same time. None means one for every two
            cores, at least two and at most eight, and one while a picture is drawn on the
            same cores.
        build_timeout_s: Seconds after which a worker's build counts as hanging.
        build_attempts: Attempts for a kind whose worker failed, crashed, hung or ran out of
            memory, before the kind runs eager. It stays eager for good after two failures of
            workers that nothing had killed, otherwise until the next start.
        tuning: ``"idle"`` has graphs built again with more effort while the machine is idle, and
            takes those that are measured to be faster. It is meant for GPUs. ``"off"`` is the
            default: on an H200 it made none of SDXL's graphs faster.
        channels_last: Keep convolution weights and activations in NHWC order.
        captures: On a GPU, replay whole forwards as CUDA graphs.
        spot_checks: Occasionally compare a graph or CUDA graph in use with eager again, which
            takes less than 1% of the time.
        step_cache: A step cache of diffusers for pipelines with transformers, such as
            ``"first-block:0.08"``; see `StepCacheOptions`. Faster, but pictures differ.
        cfg_parallel: Draw one picture on two devices: the denoiser of a pipeline runs the negative
            prompt's half of each batch on another device. ``"auto"`` takes another GPU of the same
            kind, ``"cuda:1"`` this one; ``"off"`` uses one device.
        capture_limit: Most sizes with a CUDA graph at the same time.
        capture_limit_bytes: Most GPU memory for CUDA graphs; None means a quarter of the device's.
            They never take more than what is free.
    """

    backend: str = "inductor"
    build: str = "background"
    precision: str = "exact"
    store: Path | None = None
    store_limit_bytes: int = 8 * 2**30
    workers: int | None = None
    build_timeout_s: float = 600.0
    build_attempts: int = 3
    tuning: str = "off"
    channels_last: bool = True
    captures: bool = True
    spot_checks: bool = True
    step_cache: str = "off"
    cfg_parallel: str = "off"
    capture_limit: int = 64
    capture_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("build", self.build, BUILD_POLICIES)
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("tuning policy", self.tuning, TUNING_POLICIES)
        object.__setattr__(self, "step_cache", str(StepCacheOptions.parse(self.step_cache)))
        if not isinstance(self.cfg_parallel, str) or not _DEVICE.fullmatch(self.cfg_parallel):
            raise OptionError(
                f"CFG parallel cannot use {self.cfg_parallel!r}.", "Choose auto, off or cuda:1."
            )
        if self.store is not None:
            object.__setattr__(self, "store", given_path(self.store, "store"))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise OptionError(
                    f"{name} must be True or False, not {getattr(self, name)!r}.",
                    "Leave it out for the default.",
                )
        for name in _NUMBERS:
            value = getattr(self, name)
            may_be_left_out = value is None and name in _OPTIONAL_NUMBERS
            is_number = isinstance(value, int | float) and value == value  # nan is none
            if not is_number and not may_be_left_out:
                raise OptionError(
                    f"{name} must be a number, not {value!r}.", "Leave it out for the default."
                )
        if self.store_limit_bytes <= 0:
            raise OptionError(
                "The store's size limit must be above zero.", "Leave it out for 8 GB."
            )
        if self.workers is not None and self.workers < 1:
            raise OptionError("At least one build worker is needed.", "Leave `workers` out.")
        for name in ("build_timeout_s", "build_attempts"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} must be above zero.", "Leave it out for the default.")

    @classmethod
    def parse(cls, options: CompileOptions | Mapping[str, Any] | None) -> CompileOptions:
        """Read options: this class, a mapping of its fields, or None for the defaults.

        Raises:
            OptionError: A name is unknown or a value cannot be used.
        """
        if options is None:
            return cls()
        if isinstance(options, CompileOptions):
            return options
        if not isinstance(options, Mapping):
            raise OptionError(
                f"{options!r} are no options.", 'Write for example {"precision": "fp8"}.'
            )
        check_names(options, [f.name for f in fields(cls)], "compile option")
        return replace(cls(), **dict(options))


def parse_ignores(ignores: object) -> frozenset[str]:
    """Check the names of components that stay eager.

    Returns:
        A subset of `COMPONENTS`; ``"vae"`` means both encoder and decoder.

    Raises:
        OptionError: A name is not a component.
    """
    names = [ignores] if isinstance(ignores, str) else ignores
    if not isinstance(names, Iterable):
        raise OptionError(f"{ignores!r} names no components.", 'Write for example ("vae",).')
    names = list(names)
    for name in names:
        if name not in (*COMPONENTS, *_NEVER_COMPILED):
            raise OptionError(f"Unknown component {name!r}.", f"Known: {', '.join(COMPONENTS)}.")
    chosen = set(names) & set(COMPONENTS)
    if "vae" in chosen:
        chosen |= {"vae_encoder", "vae_decoder"}
    return frozenset(chosen)


def precision_changes(precision: str, ignored: Iterable[str] = ()) -> dict[str, str]:
    """Return by name what a precision changes in pictures; empty for the exact one.

    Args:
        precision: One of `PRECISIONS`.
        ignored: From `parse_ignores`; these components stay eager, and so exact.
    """
    if precision == CompileOptions.precision:
        return {}
    exact = sorted(set(ignored) - {"vae"})  # its halves are named too
    return {"precision": precision, **({"exact": ", ".join(exact)} if exact else {})}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"Unknown {name} {value!r}.", f"Known: {', '.join(known)}.")
