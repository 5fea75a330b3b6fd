"""The identity of a model: checkpoint, VAE, LoRAs and precision, by content."""

from __future__ import annotations

import argparse
import platform
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait

from onediff_ext.cli import library_imports
from onediff_ext.cli.model_arguments import parse_ignored_components
from onediff_ext.core.demo_files import DEMO_MODEL
from onediff_ext.core.errors import CheckpointError, OptionError
from onediff_ext.core.options import precision_changes
from onediff_ext.hosts.diffusers.jobs import model_identity as jobs
from onediff_ext.hosts.diffusers.lora.lora_option import parse_lora

# Cached hashes are found within this time. A run with nothing to do then imports no libraries.
_CACHED_WITHIN_S = 0.2
# The entries that tell of files' contents.
_FILES = ("checkpoint", "vae", "loras", "config", "yaml", "tokenizers")


def model_identity(
    arguments: argparse.Namespace, *, imports_here: bool = True
) -> dict[str, object]:
    """Return the parts of the model that decide an image, by content.

    Cached hashes are found at once. Otherwise the libraries are imported while the files are
    hashed.

    Args:
        arguments: Of the command line.
        imports_here: This process draws, so it needs the libraries.

    Raises:
        CheckpointError: A file cannot be read.
        OptionError: A LoRA's weight is not a number, or the demo model is not installed.
    """
    found = _identity_in_thread(arguments)
    if not wait([found], _CACHED_WITHIN_S).done and imports_here:
        library_imports.import_libraries()
    return found.result()


class SameFiles:
    """Checks in a thread that this machine's files are those of the run.

    A worker on another machine has its own file under the path of the command line. Cached hashes
    are found at once, so where the run was started, nothing is read.

    Args:
        arguments: Of the command line, its paths absolute.
        identity: From `model_identity`, where the run was started.
    """

    def __init__(self, arguments: argparse.Namespace, identity: Mapping[str, object]) -> None:
        self._model, self._identity = arguments.model, identity
        self._found = _identity_in_thread(arguments)

    def check(self) -> None:
        """Wait for the hashes, and compare them.

        Raises:
            CheckpointError: A file cannot be read, or differs.
        """
        here = self._found.result()
        differing = [n for n in _FILES if here.get(n) != self._identity.get(n)]
        if differing:
            raise CheckpointError(
                f"On {platform.node()}, {self._model} or what belongs to it is another file than"
                f" where the run was started (differs: {', '.join(differing)}).",
                "Copy the files there, or name ones on a disk that all machines share.",
            )


def _identity_in_thread(arguments: argparse.Namespace) -> Future[dict[str, object]]:
    found: Future[dict[str, object]] = Future()

    def find() -> None:
        try:
            found.set_result(_hashed_identity(arguments))
        except BaseException as exc:
            found.set_exception(exc)

    # A daemon thread: Ctrl-C does not wait for it.
    threading.Thread(target=find, name="onediff-hash", daemon=True).start()
    return found


def _hashed_identity(arguments: argparse.Namespace) -> dict[str, object]:
    from onediff_ext.store import ContentHashes, GraphLibrary, default_root

    root = arguments.store or default_root()
    hashes = ContentHashes(GraphLibrary(root, limit_bytes=2**60).folder)
    if arguments.model == DEMO_MODEL and not arguments.model.exists():
        raise OptionError(
            "This installation has no demo model.", "Name a checkpoint with --model FILE."
        )
    identity = jobs.model_identity(
        hashes,
        arguments.model,
        map(parse_lora, arguments.lora),
        dtype=arguments.dtype,
        vae=arguments.vae,
        config=arguments.config,
        vae_tiling=arguments.vae_tiling,
    )
    return identity | precision_changes(arguments.precision, parse_ignored_components(arguments))
