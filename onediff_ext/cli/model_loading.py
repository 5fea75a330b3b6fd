"""Loads the checkpoint of the command line and puts graphs under it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onediff_ext.cli import library_imports
from onediff_ext.cli.device_options import find_device
from onediff_ext.cli.model_arguments import parse_ignored_components, parse_options
from onediff_ext.core.errors import OptionError
from onediff_ext.core.start_up_times import StartUpTimes
from onediff_ext.hosts.diffusers.lora.lora_option import parse_lora

if TYPE_CHECKING:
    from onediff_ext.building.build_progress import ProgressListener
    from onediff_ext.hosts.diffusers.checkpoints.tensor_read_ahead import TensorReadAhead
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
    from onediff_ext.session.session import Session


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint that is ready to draw.

    Args:
        image_generator: Draws.
        session: Owns the graphs; None when nothing is compiled.
        identity: Checkpoint and LoRAs, as they decide an image.
        ready_seconds: From the end of the imports until ready.
        times: When the steps until then were done.
    """

    image_generator: ImageGenerator
    session: Session | None
    identity: dict[str, object]
    ready_seconds: float
    times: StartUpTimes

    def close(self) -> None:
        """End builds that still run; the next run goes on there."""
        if self.session is not None:
            self.session.close()

    def leave(self) -> None:
        """As `close`, but workers finish the graphs that they are building after this process."""
        if self.session is not None:
            self.session.background.hand_over()


def load_model(
    arguments: argparse.Namespace,
    identity: dict[str, object],
    listener: ProgressListener | None = None,
    check: Callable[[ImageGenerator], None] | None = None,
    *,
    hold_builds: bool = False,
) -> LoadedModel:
    """Load checkpoint and LoRAs, put graphs under them, and build missing graphs.

    Args:
        arguments: Of the command line.
        identity: From `model_identity`.
        listener: Told of each build.
        check: Raises when the checkpoint cannot do the job; called before anything is built.
        hold_builds: Build nothing here; the caller finds the block kinds and has them built.

    Raises:
        OneDiffError: Something cannot be loaded or used.
    """
    times = StartUpTimes()
    library_imports.import_torch()
    times.mark("torch")
    reading = read_weights_ahead(arguments)
    session = None if arguments.eager else open_session(arguments, identity)
    library_imports.import_libraries()
    times.mark("imports")
    start = time.perf_counter()
    image_generator = load_image_generator(arguments, reading)
    times.mark("model")
    if check is not None:
        check(image_generator)
    if session is not None:
        put_graphs_under(image_generator, arguments, session, listener, hold_builds=hold_builds)
        times.mark("graphs")
    ready_s = time.perf_counter() - start
    return LoadedModel(image_generator, session, identity, ready_s, times)


def open_session(arguments: argparse.Namespace, identity: dict[str, object]) -> Session:
    """Open a session; it reads the checkpoint's graphs ahead while the checkpoint is loaded.

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


def read_weights_ahead(arguments: argparse.Namespace) -> TensorReadAhead | None:
    """Begin to read a single file's weights to the device, while libraries are imported."""
    from onediff_ext.hosts.diffusers.checkpoints.tensor_read_ahead import TensorReadAhead
    from onediff_ext.hosts.diffusers.checkpoints.weights_dtype import weights_dtype

    if arguments.config is not None or arguments.model.is_dir():
        return None
    try:
        device = find_device(arguments.device)
    except OptionError:
        return None  # the session reports it when it is opened
    dtype = weights_dtype(arguments.dtype, device, arguments.model)
    return TensorReadAhead(arguments.model, dtype, device, without_vae=arguments.vae is not None)


def load_image_generator(
    arguments: argparse.Namespace, reading: TensorReadAhead | None = None
) -> ImageGenerator:
    """Load checkpoint and LoRAs; everything runs eager.

    Args:
        arguments: Of the command line.
        reading: From `read_weights_ahead`.

    Raises:
        OneDiffError: Something cannot be loaded or used.
    """
    from onediff_ext.hosts.diffusers.checkpoints.load import load_checkpoint
    from onediff_ext.hosts.diffusers.checkpoints.weights_dtype import weights_dtype
    from onediff_ext.hosts.diffusers.drawing.image_generator import ImageGenerator
    from onediff_ext.hosts.diffusers.lora.lora_file import load_lora

    device = find_device(arguments.device)
    checkpoint = load_checkpoint(
        arguments.model,
        dtype=weights_dtype(arguments.dtype, device, arguments.model, arguments.config),
        device=device,
        vae_path=arguments.vae,
        config=arguments.config,
        read_ahead=reading,
    )
    image_generator = ImageGenerator(checkpoint, arguments.vae_tiling)
    for path, weight in map(parse_lora, arguments.lora):
        load_lora(image_generator.pipe, path, weight)
    return image_generator


def put_graphs_under(
    image_generator: ImageGenerator,
    arguments: argparse.Namespace,
    session: Session,
    listener: ProgressListener | None = None,
    *,
    hold_builds: bool = False,
) -> None:
    """Compile a loaded checkpoint: load or build its graphs, and compare them with eager.

    Args:
        image_generator: From `load_image_generator`.
        arguments: Of the command line.
        session: From `open_session`.
        listener: Told of each build that the command waits for.
        hold_builds: Build nothing here.
    """
    from onediff_ext.engine.blocks.block_kind import KindState
    from onediff_ext.hosts.diffusers.compile import compile_pipe
    from onediff_ext.hosts.diffusers.probe import probe

    if session.options.build == "wait":
        session.listener = listener  # nobody watches builds in the background
    ignored = parse_ignored_components(arguments)
    compile_pipe(image_generator.pipe, ignores=ignored, session=session)
    if not hold_builds:
        probe(image_generator.pipe)
    if any(kind.state is KindState.UNCHECKED for kind in session.kinds):
        # Compares the new graphs with eager here, so that no picture gets eager's result for one
        # call: pictures of a filled store are the same in every process, to the last bit.
        probe(image_generator.pipe)
    assert session.checkpoint is not None
    session.use_checkpoint(
        session.checkpoint.content_hash,
        name=image_generator.checkpoint.name,
        path=str(image_generator.checkpoint.path.resolve()),
        architecture=image_generator.checkpoint.architecture,
    )
    session.record_checkpoint()
