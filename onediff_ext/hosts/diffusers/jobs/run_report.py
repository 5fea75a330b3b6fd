"""The report of a run as data, for ``--report``, tables and tests."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from onediff_ext.hosts.diffusers.vae.vae_fallbacks import VaeNote
    from onediff_ext.session.session import Session


@dataclass(frozen=True)
class PictureResult:
    """One finished image.

    Args:
        input, output: Paths as text; input is empty for text to image.
        width, height: Of the result, in pixels.
        seconds: Its share of its batch's time.
        seconds_per_step: Median time of its batch's sampling steps.
    """

    input: str
    output: str
    width: int
    height: int
    seconds: float
    seconds_per_step: float


@dataclass
class RunReport:
    """Results, graphs, eager reasons, warnings and memory of one run.

    `workers` has a row for each worker of a run on several GPUs, and is empty otherwise.
    `start_up` has the seconds at which the steps of the start-up were done, counted from the start
    of the process.
    """

    device: str = ""
    pictures: list[PictureResult] = field(default_factory=list)
    already_done: list[str] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    built: int = 0
    loaded: int = 0
    reused: int = 0
    recompiles: int = 0
    fallbacks: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    ready_seconds: float = 0.0
    workers: list[dict[str, Any]] = field(default_factory=list)
    start_up: dict[str, float] = field(default_factory=dict)
    _noted: set[str] = field(default_factory=set, repr=False)

    def take_notes(self, notes: Sequence[VaeNote]) -> None:
        """Add the VAE's notes as warnings; only the first note of each kind."""
        for note in notes:
            if note.what not in self._noted:
                self._noted.add(note.what)
                self.warnings.append(str(note))

    def take_session(self, session: Session | None, device: torch.device) -> None:
        """Add the session's counts, eager reasons and warnings, and the peak memory."""
        self.peak_bytes = peak_bytes(device)
        self.recompiles = recompile_count()
        if session is None:
            return
        self.built, self.loaded = session.count("built"), session.count("loaded")
        self.warnings += session.build_context.outcomes.warnings
        self.fallbacks = left_eager(session)

    def as_json(self) -> dict[str, Any]:
        """Return the report as ``--report`` writes it."""
        return {
            "device": self.device,
            "versions": versions(),
            "pictures": [asdict(picture) for picture in self.pictures],
            "already_done": self.already_done,
            "graphs": {"built": self.built, "loaded": self.loaded, "reused": self.reused},
            "recompiles": self.recompiles,
            "fallbacks": self.fallbacks,
            "skipped": self.skipped,
            "warnings": self.warnings,
            "peak_bytes": self.peak_bytes,
            "ready_seconds": self.ready_seconds,
            "start_up": self.start_up,
            **({"workers": self.workers} if self.workers else {}),
        }


def left_eager(session: Session) -> list[dict[str, Any]]:
    """Return the blocks that ran eager in place of a graph, with reasons; most calls first."""
    from onediff_ext.engine.blocks.block_kind import KindState

    calls = Counter({(f.what, f.reason): f.count for f in session.fallbacks()})
    for kind in session.kinds:
        if kind.state is KindState.MISSING:
            calls[kind.label, _missing_reason(session)] += kind.calls
    return [
        {"what": what, "reason": reason, "count": count}
        for (what, reason), count in calls.most_common()
    ]


def _missing_reason(session: Session) -> str:
    if session.options.build == "never":
        return "no graph is stored, and none may be built"
    if blocked_reason := session.build_context.outcomes.blocked_reason:
        return blocked_reason
    return "its graph was still being built; the next run goes on"


class ReuseCounter:
    """Counts for each size the block kinds that reused a graph of an earlier size."""

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self._seen: set[tuple[int, int]] = set()
        self.by_size: dict[tuple[int, int], Counter[str]] = {}

    def before(self) -> set[str]:
        """Return the digests of the block kinds that have a graph now."""
        if self._session is None:
            return set()
        return {kind.key.digest for kind in self._session.kinds if kind.graph is not None}

    def after(self, width_px: int, height_px: int, had: set[str]) -> int:
        """Count a finished batch; returns the reused block kinds if its size is new, else 0."""
        size = (width_px, height_px)
        if self._session is None or size in self._seen:
            return 0
        self._seen.add(size)
        now = {k.key.digest: k.source for k in self._session.kinds if k.graph is not None}
        fresh = Counter(source for digest, source in now.items() if digest not in had)
        reused = len(now) - sum(fresh.values())
        self.by_size[size] = Counter({**fresh, "reused": reused})
        return reused


def recompile_count() -> int:
    """Return how many graphs Dynamo or Inductor compiled in this process, by their own counters.

    Inductor's count of kernels is left out: loading a stored graph raises it too.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = dynamo.counters
    return int(
        counters["stats"]["unique_graphs"]
        + counters["inductor"]["fxgraph_cache_miss"]
        + counters["inductor"]["fxgraph_cache_bypass"]
        + counters["aot_autograd"]["autograd_cache_miss"]
        + counters["aot_autograd"]["autograd_cache_bypass"]
    )


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def describe_device(device: torch.device) -> str:
    """Return a text such as ``"cpu: 8 threads, x86_64"`` or ``"cuda: NVIDIA H200"``."""
    import torch

    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {torch.get_num_threads()} threads, {platform.machine()}"


def versions() -> dict[str, str]:
    """Return the versions of everything that decides an image or its speed."""
    found = {"python": platform.python_version()}
    libraries = ("torch", "diffusers", "transformers", "peft", "triton", "flash-attn-4")
    for name in ("onediff-ext", *libraries):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
