"""One checkpoint and one session behind the stand-alone page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onediff_ext.core.errors import OneDiffError, OptionError
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.status import Status
from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session, undo_compile
from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, ImageGenerator
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.fields import STOP
from onediff_ext.store import ContentHashes, GraphLibrary, default_root

if TYPE_CHECKING:
    import torch

    from onediff_ext.session.session import Session


class CancelledError(OneDiffError):
    """The user pressed Cancel."""

    def __init__(self) -> None:
        super().__init__("Cancelled.")


class StandaloneApp:
    """Loads, compiles and draws, one job at a time; others wait for their turn.

    Args:
        device, dtype: Of the weights.
        options: Store, limit and workers; the panel decides the rest.
        vae_tiling: As `ImageGenerator` takes it.

    Attributes:
        image_generator: Of the loaded checkpoint; None before the first.
        session: Owns the graphs; None when nothing is compiled.
        identity: Checkpoint and LoRAs, as they decide a picture.
        is_busy: A job is running.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        options: CompileOptions,
        vae_tiling: str = "auto",
    ) -> None:
        self.device, self.dtype, self.options = device, dtype, options
        self._vae_tiling = vae_tiling
        # What is known of each checkpoint's VAE, as long as the process lives.
        self._overflowing: dict[object, set[str]] = {}
        self.image_generator: ImageGenerator | None = None
        self.session: Session | None = None
        self.identity: dict[str, object] = {}
        self._sessions: dict[tuple[str, bool, str], Session] = {}
        self._applied: tuple[object, ...] | None = None
        self._why_eager = ""
        self._turn = threading.RLock()
        self._waiting, self._counting = 0, threading.Lock()
        self._cancelled = threading.Event()
        self.is_busy = False

    @property
    def library(self) -> GraphLibrary:
        """The graph library, whether or not anything is compiled."""
        if self.session is not None:
            return self.session.library
        root = self.options.store if self.options.store is not None else default_root()
        return GraphLibrary(root, self.options.store_limit_bytes)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other job runs, and be cancellable meanwhile."""
        self._count(1)
        try:
            self._turn.acquire()
        finally:
            self._count(-1)
        try:
            self._cancelled.clear()
            self.is_busy = True
            try:
                yield
            finally:
                self.is_busy = False
        finally:
            self._turn.release()

    def is_waited_for(self) -> bool:
        """Whether others wait for the job that runs now to end."""
        return self._waiting > 0

    def _count(self, change: int) -> None:
        with self._counting:
            self._waiting += change

    def cancel(self) -> None:
        """End the job that runs now, at its next step."""
        if self.is_busy:
            self._cancelled.set()

    def check_cancelled(self, *_: object) -> None:
        """Raise CancelledError when the user has pressed the button."""
        if self._cancelled.is_set():
            raise CancelledError

    def load(self, model: Path, loras: Sequence[tuple[Path, float]] = ()) -> None:
        """Take another checkpoint; the one before stays if it cannot be loaded.

        Raises:
            OneDiffError: A file cannot be loaded.
        """
        with self.turn():
            hashes = ContentHashes(self.library.folder)
            identity: dict[str, object] = {
                "checkpoint": hashes.content_hash(model),
                "loras": [
                    f"{path.stem}:{weight:g}:{hashes.content_hash(path)[:12]}"
                    for path, weight in loras
                ],
                "dtype": str(self.dtype),
            }
            if self.image_generator is not None and identity == self.identity:
                return
            self.check_cancelled()
            checkpoint = load_checkpoint(model, dtype=self.dtype, device=self.device)
            overflowing = self._overflowing.setdefault(identity["checkpoint"], set())
            image_generator = ImageGenerator(checkpoint, self._vae_tiling, overflowing)
            for path, weight in loras:
                self.check_cancelled()
                load_lora(image_generator.pipe, path, weight)
            self.image_generator, self.identity, self._applied = image_generator, identity, None

    def draw(
        self,
        choices: Choices,
        width_px: int,
        height_px: int,
        batch: int,
        job: Callable[[ImageGenerator], Drawn],
        on_step: Callable[[int], None] = lambda _: None,
    ) -> Drawn:
        """Draw with what the panel says.

        Args:
            choices: From the panel.
            width_px, height_px, batch: What is drawn; decides about size box and batch range.
            job: Draws with the painter.
            on_step: Called after each sampling step.

        Raises:
            CancelledError: The user pressed Cancel.
            OptionError: There is no checkpoint, or something cannot be drawn.
        """
        with self.turn():
            image_generator = self.loaded()
            self.apply(choices, choices.outside(width_px, height_px, batch))

            def step(number: int) -> None:
                self.check_cancelled()
                on_step(number)

            image_generator.on_step = step
            try:
                drawn = job(image_generator)
            finally:
                image_generator.on_step = lambda _: None
            if choices.on_failure == STOP and (reasons := self.status().reasons):
                raise OptionError(
                    f"Graphs could not be used: {reasons[0]}.",
                    "The panel's advanced part says to stop then.",
                )
            return drawn

    def loaded(self) -> ImageGenerator:
        """The painter.

        Raises:
            OptionError: No checkpoint is loaded.
        """
        if self.image_generator is None:
            raise OptionError("No checkpoint is loaded.", "Choose one at the top of the page.")
        return self.image_generator

    def apply(self, choices: Choices, why_eager: str | None = None) -> None:
        """Put graphs under the checkpoint as the panel says, or take them away.

        Args:
            choices: From the panel.
            why_eager: Why this job runs without, if it does.
        """
        image_generator = self.loaded()
        wanted: tuple[object, ...] = (False,)
        if choices.enabled and why_eager is None:
            wanted = (True, self._session_key(choices), choices.ignores)
        self._why_eager = why_eager or ""
        if wanted == self._applied:
            return
        undo_compile(image_generator.pipe)
        self.session = None
        if wanted[0]:
            session = self._session_of(choices)
            checkpoint = image_generator.checkpoint
            session.use_checkpoint(
                str(self.identity["checkpoint"]),
                name=checkpoint.name,
                path=str(checkpoint.path.resolve()),
                architecture=checkpoint.architecture,
                device=self.device,
            )
            compile_pipe(image_generator.pipe, ignores=choices.ignores, session=session)
            self.session = session
        self._applied = wanted

    def status(self) -> Status:
        """What is true now."""
        if self.session is None:
            if self._why_eager:
                return Status("eager", reasons=(self._why_eager,))
            return Status()
        return self.session.status()

    def close(self) -> None:
        """End what is still being built; the next start goes on there."""
        for session in self._sessions.values():
            session.close()

    def _session_of(self, choices: Choices) -> Session:
        key = self._session_key(choices)
        if key not in self._sessions:
            backend, captures, precision = key
            self._sessions[key] = new_session(
                replace(self.options, backend=backend, captures=captures, precision=precision)
            )
        return self._sessions[key]

    @staticmethod
    def _session_key(choices: Choices) -> tuple[str, bool, str]:
        return choices.backend, choices.captures, choices.precision
