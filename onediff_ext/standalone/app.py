"""The application behind the stand-alone page: one checkpoint and its session."""

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
from onediff_ext.hosts.diffusers.checkpoints.weights_dtype import weights_dtype
from onediff_ext.hosts.diffusers.compile import compile_pipe, new_session, undo_compile
from onediff_ext.hosts.diffusers.drawing.image_generator import Drawn, ImageGenerator
from onediff_ext.hosts.diffusers.jobs.model_identity import model_identity
from onediff_ext.hosts.diffusers.lora.lora_file import load_lora
from onediff_ext.panel.choices import Choices
from onediff_ext.panel.fields import STOP
from onediff_ext.session.sessions_by_options import SessionsByOptions
from onediff_ext.store import ContentHashes, GraphLibrary, default_root

if TYPE_CHECKING:
    import torch

    from onediff_ext.session.session import Session


class CancelledError(OneDiffError):
    """The user pressed Interrupt."""

    def __init__(self) -> None:
        super().__init__("Interrupted.")


class StandaloneApp:
    """Loads, compiles and draws, one job at a time; other jobs wait for their turn.

    Args:
        device: Of the weights.
        dtype_name: Of the weights: "auto", "fp32", "fp16" or "bf16", as for `weights_dtype`.
        options: Store, limit and workers; the panel sets the others.
        vae_tiling: As for `ImageGenerator`.

    Attributes:
        image_generator: Of the loaded checkpoint; None before the first load.
        dtype: Of the loaded checkpoint's weights.
        session: Owns the graphs; None when nothing is compiled.
        identity: Checkpoint and LoRAs, as they decide an image.
        loras: Files and weights of the loaded LoRAs.
        dtype_name, vae_tiling: As passed in.
        is_busy: A job is running.
    """

    def __init__(
        self,
        device: torch.device,
        dtype_name: str,
        options: CompileOptions,
        vae_tiling: str = "auto",
    ) -> None:
        self.device, self.dtype_name, self.options = device, dtype_name, options
        self.vae_tiling = vae_tiling
        # Parts of each checkpoint's VAE that overflow in float16, for the life of the process.
        self._overflowing: dict[object, set[str]] = {}
        self.image_generator: ImageGenerator | None = None
        self.dtype: torch.dtype | None = None
        self.session: Session | None = None
        self.identity: dict[str, object] = {}
        self.loras: tuple[tuple[Path, float], ...] = ()
        self._sessions = SessionsByOptions(new_session)
        self._applied: tuple[object, ...] | None = None
        self._eager_reason = ""
        self._turn = threading.RLock()
        self._waiting, self._counting = 0, threading.Lock()
        self._cancelled = threading.Event()
        self.is_busy = False

    @property
    def library(self) -> GraphLibrary:
        """The graph library, with or without compiled graphs."""
        if self.session is not None:
            return self.session.library
        root = self.options.store if self.options.store is not None else default_root()
        return GraphLibrary(root, self.options.store_limit_bytes)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other job runs, then run as the job that `cancel` ends."""
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
        """Whether other jobs wait for the running one."""
        return self._waiting > 0

    def _count(self, change: int) -> None:
        with self._counting:
            self._waiting += change

    def cancel(self) -> bool:
        """End the running job at its next step; return whether one runs."""
        if self.is_busy:
            self._cancelled.set()
        return self.is_busy

    def check_cancelled(self, *_: object) -> None:
        """Raise CancelledError if the user has pressed Interrupt."""
        if self._cancelled.is_set():
            raise CancelledError

    def load(self, model: Path, loras: Sequence[tuple[Path, float]] = ()) -> None:
        """Load another checkpoint; the current one stays if that fails.

        Raises:
            OneDiffError: A file cannot be loaded.
        """
        with self.turn():
            hashes = ContentHashes(self.library.folder)
            identity = model_identity(
                hashes, model, loras, dtype=self.dtype_name, vae_tiling=self.vae_tiling
            )
            if self.image_generator is not None and identity == self.identity:
                return
            self.check_cancelled()
            dtype = weights_dtype(self.dtype_name, self.device, model)
            checkpoint = load_checkpoint(model, dtype=dtype, device=self.device)
            overflowing = self._overflowing.setdefault(identity["checkpoint"], set())
            image_generator = ImageGenerator(checkpoint, self.vae_tiling, overflowing)
            for path, weight in loras:
                self.check_cancelled()
                load_lora(image_generator.pipe, path, weight)
            self.image_generator, self.identity, self._applied = image_generator, identity, None
            self.dtype = dtype
            self.loras = tuple(loras)

    def draw(
        self,
        choices: Choices,
        width_px: int,
        height_px: int,
        batch: int,
        job: Callable[[ImageGenerator], Drawn],
        on_step: Callable[[int], None] = lambda _: None,
    ) -> Drawn:
        """Draw with the panel's settings.

        Args:
            choices: From the panel.
            width_px, height_px, batch: Size and number of images; outside the panel's size range
                the job runs eager.
            job: Draws with the image generator.
            on_step: Called after each sampling step.

        Raises:
            CancelledError: The user pressed Interrupt.
            OptionError: No checkpoint is loaded, or a setting cannot be used.
        """
        with self.turn():
            image_generator = self.loaded()
            self.apply(choices, choices.outside_reason(width_px, height_px, batch))

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
                    '"If graphs cannot be used", under Advanced in the panel, says to stop then.',
                )
            return drawn

    def loaded(self) -> ImageGenerator:
        """Return the image generator.

        Raises:
            OptionError: No checkpoint is loaded.
        """
        if self.image_generator is None:
            raise OptionError("No checkpoint is loaded.", "Choose one at the top of the page.")
        return self.image_generator

    def apply(self, choices: Choices, eager_reason: str | None = None) -> None:
        """Put graphs under the checkpoint or remove them, as the panel says.

        Args:
            choices: From the panel.
            eager_reason: Why this job runs without graphs; None with graphs.
        """
        image_generator = self.loaded()
        options = self._options(choices)
        wanted: tuple[object, ...] = (False,)
        if choices.enabled and eager_reason is None:
            wanted = (True, options, choices.ignores)
        self._eager_reason = eager_reason or ""
        if wanted == self._applied:
            return
        undo_compile(image_generator.pipe)
        self.session = None
        if wanted[0]:
            session = self._sessions.session_for(options)
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
        """Return the current status."""
        if self.session is None:
            if self._eager_reason:
                return Status("eager", reasons=(self._eager_reason,))
            return Status()
        return self.session.status()

    @property
    def are_builds_paused(self) -> bool:
        """Whether the user has paused the builds of all sessions."""
        return self._sessions.are_paused

    def pause_builds(self) -> None:
        """End all builds within a moment, and start none until `go_on_with_builds`."""
        self._sessions.pause_builds()

    def go_on_with_builds(self) -> None:
        """End a pause, and build what is missing, also what was cancelled."""
        self._sessions.go_on_with_builds()

    def cancel_builds(self) -> None:
        """End all builds within a moment, and a pause; a picture has its missing graphs built."""
        self._sessions.cancel_builds()

    def close(self) -> None:
        """End builds that still run; the next start goes on there."""
        self._sessions.close()

    def _options(self, choices: Choices) -> CompileOptions:
        return replace(
            self.options,
            backend=choices.backend,
            captures=choices.captures,
            precision=choices.precision,
        )
