"""Arguments that every command with a checkpoint has, and what they load."""

from __future__ import annotations

import argparse
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.garbage_collection import without_collection
from onediff_ext.core.options import (
    BACKENDS,
    BUILD_POLICIES,
    COMPONENTS,
    PRECISIONS,
    CompileOptions,
    parse_ignores,
)

if TYPE_CHECKING:
    from onediff_ext.building.builder import ProgressListener
    from onediff_ext.core.shapes import BatchShape
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
    from onediff_ext.session.session import Session

logger = logging.getLogger(__name__)

_DTYPES = ("auto", "fp32", "fp16", "bf16")
_VAE_TILING = ("auto", "on", "off")
# Cached hashes are there by then; a run that finds nothing to do should not import libraries.
_AT_ONCE_S = 0.2
_MAX_AMOUNT = 1e12


def default_model() -> Path:
    """The demo checkpoint that ships with the package."""
    return Path(__file__).resolve().parent.parent / "assets" / "demo" / "onediff-demo.safetensors"


def amount(text: str) -> float:
    """A number, zero or above, for argparse; so large that bytes or seconds overflow is none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= _MAX_AMOUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {_MAX_AMOUNT:g}")
    return number


def positive_amount(text: str) -> float:
    """A number above zero, for argparse."""
    number = amount(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above zero")
    return number


def positive_count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or above")
    return int(text)


def given_sizes(text: str) -> list[BatchShape]:
    """Sizes that a command cannot do without.

    Raises:
        OptionError: There is none, or one cannot be generated.
    """
    from onediff_ext.core.shapes import parse_sizes

    shapes = parse_sizes(text)
    if not shapes:
        raise OptionError("No size is given.", 'Write for example "512x768, 720x960@2".')
    return shapes


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Where graphs are kept."""
    group = parser.add_argument_group("graph store")
    group.add_argument("--store", type=Path, help="folder of the graph store (default: user cache)")
    group.add_argument(
        "--store-limit-gb",
        type=positive_amount,
        default=CompileOptions.store_limit_bytes / 2**30,
        help="evict the least recently used graphs above this size (default: %(default)g)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Checkpoint, device and compile options."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        type=Path,
        default=default_model(),
        help=".safetensors checkpoint or diffusers folder (default: the demo model)",
    )
    group.add_argument("--vae", type=Path, help="VAE .safetensors in place of the checkpoint's own")
    group.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:WEIGHT]",
        help="LoRA .safetensors, may be given several times",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", choices=_DTYPES, default="auto", help="auto: fp16 on GPUs")
    group.add_argument(
        "--vae-tiling",
        choices=_VAE_TILING,
        default="auto",
        help="encode and decode in overlapping tiles, which changes a picture a little; auto: only"
        " what would not fit into memory otherwise (default: auto)",
    )
    compile_group = parser.add_argument_group("compilation")
    compile_group.add_argument("--backend", choices=BACKENDS, default=CompileOptions.backend)
    compile_group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=CompileOptions.precision,
        help="of linear layers: fp8 and int8 are faster on GPUs that have them, and change pictures"
        " a little (default: exact, which is as without OneDiff)",
    )
    compile_group.add_argument("--eager", action="store_true", help="compile nothing at all")
    compile_group.add_argument("--ignore-vae", action="store_true", help="leave the VAE alone")
    compile_group.add_argument(
        "--ignore", action="append", default=[], choices=COMPONENTS, help="leave a part alone"
    )
    compile_group.add_argument(
        "--build",
        choices=BUILD_POLICIES,
        help="missing graphs: build beside the pictures (background), before them (wait), or not"
        " at all (default: background; warmup and bench wait)",
    )
    compile_group.add_argument("--no-build", action="store_true", help="the same as --build never")
    compile_group.add_argument(
        "--workers", type=positive_count, help="build processes at the same time"
    )
    add_store_arguments(parser)


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint that is ready to draw.

    Args:
        image_generator: Draws.
        session: Owns the graphs; None when nothing is compiled.
        identity: Checkpoint and LoRAs, as they decide a picture.
        ready_seconds: From the end of the imports to here.
    """

    image_generator: ImageGenerator
    session: Session | None
    identity: dict[str, object]
    ready_seconds: float

    def close(self) -> None:
        """End what is still being built; the next run goes on there."""
        if self.session is not None:
            self.session.close()


def parse_options(arguments: argparse.Namespace) -> CompileOptions:
    """Compile options from the command line.

    Raises:
        OptionError: A value cannot be used.
    """
    return CompileOptions(
        backend=arguments.backend,
        precision=arguments.precision,
        build="never" if arguments.no_build else (arguments.build or CompileOptions.build),
        store=arguments.store,
        store_limit_bytes=int(arguments.store_limit_gb * 2**30),
        workers=arguments.workers,
    )


def model_identity(arguments: argparse.Namespace) -> dict[str, object]:
    """What of the model decides a picture.

    That is known at once when the hashes are cached. Otherwise the libraries are imported while
    the files are hashed.

    Raises:
        CheckpointError: A file cannot be read.
        OptionError: A LoRA's weight is no number.
    """
    found: Future[dict[str, object]] = Future()

    def find() -> None:
        try:
            found.set_result(_model_identity(arguments))
        except BaseException as exc:
            found.set_exception(exc)

    # Ctrl-C does not wait for it.
    threading.Thread(target=find, name="onediff-hash", daemon=True).start()
    if not wait([found], _AT_ONCE_S).done:
        import_libraries()
    return found.result()


def _model_identity(arguments: argparse.Namespace) -> dict[str, object]:
    from onediff_ext.store import ContentHashes, GraphLibrary, default_root

    root = arguments.store or default_root()
    hashes = ContentHashes(GraphLibrary(root, limit_bytes=2**60).folder)
    if arguments.model == default_model() and not arguments.model.exists():
        raise OptionError(
            "This installation has no demo model.", "Name a checkpoint with --model FILE."
        )
    loras = [
        f"{path.stem}:{weight:g}:{hashes.content_hash(path)[:12]}"
        for path, weight in parse_loras(arguments.lora)
    ]
    identity: dict[str, object] = {
        "checkpoint": hashes.content_hash(arguments.model),
        "vae": None if arguments.vae is None else hashes.content_hash(arguments.vae),
        "loras": loras,
        "dtype": arguments.dtype,
    }
    if arguments.precision != CompileOptions.precision and not arguments.eager:
        identity["precision"] = arguments.precision
    return identity


def parse_loras(texts: list[str]) -> list[tuple[Path, float]]:
    """Read ``FILE`` or ``FILE:WEIGHT``.

    Raises:
        OptionError: The weight is no number.
    """
    found = []
    for text in texts:
        path, colon, weight = text.rpartition(":")
        # Not Path's own test, which raises for a name that is too long. C:\file is a Windows path.
        if not colon or os.path.exists(text) or len(path) == 1:
            found.append((Path(text), 1.0))
            continue
        try:
            found.append((Path(path), float(weight)))
        except ValueError:
            raise OptionError(
                f"{weight!r} is no LoRA weight.", "Write FILE.safetensors:0.8."
            ) from None
    return found


def load_model(
    arguments: argparse.Namespace,
    identity: dict[str, object],
    listener: ProgressListener | None = None,
    check: Callable[[ImageGenerator], None] | None = None,
    *,
    hold_builds: bool = False,
) -> LoadedModel:
    """Load checkpoint and LoRAs, put graphs under them, build what is missing.

    Args:
        arguments: Of the command line.
        identity: From `model_identity`.
        listener: Told of each build.
        check: Raises when the checkpoint cannot do the job; asked before anything is built.
        hold_builds: Only put graphs under it; the caller finds the kinds and has them built.

    Raises:
        OneDiffError: Something cannot be loaded or used.
    """
    import_libraries()
    start = time.perf_counter()
    session = None if arguments.eager else open_session(arguments, identity)
    image_generator = load_painter(arguments)
    if check is not None:
        check(image_generator)
    if session is not None:
        compile_painter(image_generator, arguments, session, listener, hold_builds=hold_builds)
    return LoadedModel(image_generator, session, identity, time.perf_counter() - start)


def open_session(arguments: argparse.Namespace, identity: dict[str, object]) -> Session:
    """A session that reads the checkpoint's graphs ahead while the checkpoint is being loaded.

    Raises:
        OptionError: An option cannot be used.
    """
    from onediff_ext.hosts.diffusers.compile import new_session

    session = new_session(parse_options(arguments))
    session.use_checkpoint(
        str(identity["checkpoint"]),
        name=arguments.model.stem,
        path=str(arguments.model.resolve()),
        device=find_device(arguments.device),
    )
    return session


def load_painter(arguments: argparse.Namespace) -> ImageGenerator:
    """Load checkpoint and LoRAs; everything runs eager.

    Raises:
        OneDiffError: Something cannot be loaded or used.
    """
    from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
    from onediff_ext.hosts.diffusers.lora.lora_file import load_lora

    device = find_device(arguments.device)
    dtype = find_dtype(arguments.dtype, device)
    checkpoint = load_checkpoint(
        arguments.model, dtype=dtype, device=device, vae_path=arguments.vae
    )
    image_generator = ImageGenerator(checkpoint, arguments.vae_tiling)
    for path, weight in parse_loras(arguments.lora):
        load_lora(image_generator.pipe, path, weight)
    return image_generator


def compile_painter(
    image_generator: ImageGenerator,
    arguments: argparse.Namespace,
    session: Session,
    listener: ProgressListener | None = None,
    *,
    hold_builds: bool = False,
) -> None:
    """Put graphs under a loaded checkpoint, load or build them, and compare them with eager."""
    from onediff_ext.hosts.diffusers.compile import compile_pipe
    from onediff_ext.hosts.diffusers.probe import probe

    if session.options.build == "wait":
        session.listener = listener  # beside the pictures, nobody waits for it
    ignores = [*arguments.ignore, *(["vae"] if arguments.ignore_vae else [])]
    compile_pipe(image_generator.pipe, ignores=parse_ignores(ignores), session=session)
    if not hold_builds:
        probe(image_generator.pipe)
    if session.count("built"):
        probe(image_generator.pipe)  # compares the new graphs with eager
    assert session.checkpoint is not None
    session.use_checkpoint(
        session.checkpoint.content_hash,
        name=image_generator.checkpoint.name,
        path=str(image_generator.checkpoint.path.resolve()),
        architecture=image_generator.checkpoint.architecture,
    )
    session.record_checkpoint()


@without_collection()
def import_libraries() -> None:
    """Import what takes seconds to import, so that it is not counted as start-up."""
    import diffusers
    import torch  # noqa: F401
    import transformers

    # Their own chatter does not concern the user; nothing is downloaded either.
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


def find_device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise OptionError(f"Device {name!r} cannot be used.", "Use cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"torch sees no GPU {name!r}.", "Use --device cpu, or run `onediff-ext doctor`."
        )
    return device


def find_dtype(name: str, device: Any) -> Any:
    import torch

    if name == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
