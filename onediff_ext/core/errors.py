"""The errors that OneDiff raises on purpose; some modules derive one of their own from these.

    OneDiffError
    ├── OptionError        an option or argument has a value that cannot be used
    │   └── ShapeError     an image or latent size that cannot be used
    ├── PictureError       an input picture cannot be read or an output not written
    ├── CheckpointError    a checkpoint, LoRA or config cannot be loaded
    ├── UnsafeFileError    a file is not a regular file, or too large to read
    │   └── SlowFileError  reading a file takes too long
    ├── StoreError         the graph library on disk
    │   ├── StoreFullError       no space left
    │   ├── StoreReadOnlyError   the folder cannot be written
    │   ├── GraphCorruptError    a stored graph's bytes are not what was saved
    │   └── UntrustedGraphError  native code from elsewhere, not yet trusted
    ├── ClusterError       workers on several GPUs or machines cannot be used
    └── BackendError       a backend cannot build, load or run a graph
        ├── BackendUnavailableError  the backend cannot work on this machine
        ├── MachineError   nothing can be built here now: no disk space, no compiler
        │   └── NoMemoryError        the system has no memory for another process
        ├── WorkerLostError          a build process crashed, hung or ran out of memory
        │   └── WorkerKilledError    … because something outside it killed it
        ├── ExportError    a block cannot be expressed as a graph
        │   └── BlockGoneError       the block was unloaded or changed
        ├── ModelChangedError        the model changed while a forward was recorded
        ├── CaptureError   a forward cannot be recorded as a CUDA graph
        └── ReplicaError   a model cannot be copied to another device

Each error has a message (what happened) and a hint (what to do next).
"""

from __future__ import annotations

from onediff_ext.core.url_secrets import without_secrets


class OneDiffError(Exception):
    """Base class. Passwords of URLs in its texts are hidden.

    Args:
        message: What happened, one sentence.
        hint: What the user does next, one sentence; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = without_secrets(message)
        self.hint = without_secrets(hint)
        super().__init__(self.message, self.hint)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class OptionError(OneDiffError):
    """An option or argument has a value that cannot be used."""


class ShapeError(OptionError):
    """An image or latent size that cannot be used."""


class PictureError(OneDiffError):
    """An input picture cannot be read, or an output picture cannot be written."""


class CheckpointError(OneDiffError):
    """A checkpoint, LoRA file or model config cannot be loaded."""


class UnsafeFileError(OneDiffError):
    """A file from elsewhere is not a regular file, or exceeds the limits of its kind."""


class SlowFileError(UnsafeFileError):
    """Reading a file exceeds the time limit of its kind; its content may be fine."""


class StoreError(OneDiffError):
    """The graph library on disk cannot do what was asked."""


class StoreFullError(StoreError):
    """There is no space left for a graph."""


class StoreReadOnlyError(StoreError):
    """The store's folder cannot be written."""


class GraphCorruptError(StoreError):
    """The bytes of a stored graph differ from those that were saved."""


class UntrustedGraphError(StoreError):
    """A graph is native code from elsewhere that the user has not trusted yet."""


class ClusterError(OneDiffError):
    """Workers on several GPUs or machines cannot be used."""


class BackendError(OneDiffError):
    """A backend cannot build, load or run a graph."""


class BackendUnavailableError(BackendError):
    """A backend cannot work on this machine."""


class MachineError(BackendError):
    """This machine can build nothing now; the kind is not the cause."""


class NoMemoryError(MachineError):
    """The system has no memory, or no room in its tables, for another process or thread."""

    def __init__(
        self, message: str, hint: str = "Close other programs; the build is tried again by itself."
    ) -> None:
        super().__init__(message, hint)


class WorkerLostError(BackendError):
    """A build process crashed, hung or ran out of memory; another attempt may succeed."""


class WorkerKilledError(WorkerLostError):
    """A build process was killed or ran out of memory; the kind is not the cause."""


class ExportError(BackendError):
    """A block cannot be expressed as a graph."""


class BlockGoneError(ExportError):
    """The block was unloaded or changed after its kind was determined."""


class ModelChangedError(BackendError):
    """Weights or graphs changed while a forward was recorded; it can be recorded later."""


class CaptureError(BackendError):
    """A model's forward cannot be recorded as a CUDA graph."""


class ReplicaError(BackendError):
    """A model cannot be copied to another device."""
