"""A worker's checkpoint on its own device, with the graphs that all machines share."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.start_up_times import StartUpTimes
from onediff_ext.store import GraphExchange

if TYPE_CHECKING:
    import torch

    from onediff_ext.building.shared_graphs import SharedGraphs
    from onediff_ext.cli.model_loading import LoadedModel
    from onediff_ext.hosts.diffusers.checkpoints.tensor_read_ahead import TensorReadAhead
    from onediff_ext.session.session import Session

_PULL_S = 20.0
_MOST_LOADED_AHEAD = 64  # SDXL has 34 kinds


@dataclass
class PreparedWorker:
    """What a worker has begun before it knows its program.

    Args:
        times: When the steps were done.
        reading: Reads the checkpoint's weights; None when it cannot be read ahead.
        session: Reads the checkpoint's graphs; None when its hash was not known.
        identity: Of the session's model.
    """

    times: StartUpTimes
    reading: TensorReadAhead | None = None
    session: Session | None = None
    identity: dict[str, object] | None = None


def prepare_worker(
    arguments: argparse.Namespace, identity: dict[str, object] | None = None
) -> PreparedWorker:
    """Import libraries while weights and graphs are read; needs no plan.

    Args:
        arguments: Of the command line, its paths absolute.
        identity: From `model_identity`, if it is known already.
    """
    from onediff_ext.cli import library_imports, model_loading

    prepared = PreparedWorker(StartUpTimes(), identity=identity)
    library_imports.import_torch()
    prepared.times.mark("torch")
    prepared.reading = model_loading.read_weights_ahead(arguments)
    if identity is not None and not arguments.eager:
        with contextlib.suppress(OneDiffError):  # it is opened again, and tells
            prepared.session = model_loading.open_session(arguments, identity)
    library_imports.import_libraries()
    prepared.times.mark("imports")
    return prepared


def _fetch_graphs(shared: SharedGraphs, session: Session, device: torch.device) -> None:
    """Fetch the graphs of other machines, and load them while the model is loaded."""
    fetched = shared.pull()
    if len(fetched) <= _MOST_LOADED_AHEAD:  # a bucket may have those of other models too
        session.read_ahead.add(fetched, device)


def load_shared_model(
    arguments: argparse.Namespace,
    identity: dict[str, object],
    name: str,
    exchange: GraphExchange | None,
    prepared: PreparedWorker | None = None,
    *,
    hold_builds: bool = False,
) -> tuple[LoadedModel, Any]:
    """Load the checkpoint, while the graphs of other machines are fetched.

    Args:
        arguments: Of the command line, its paths absolute.
        identity: From `model_identity`.
        name: Of the worker.
        exchange: Where graphs are shared, or None.
        prepared: From `prepare_worker`.
        hold_builds: Build nothing here.

    Returns:
        The model, and the `SharedGraphs` of this process or None.

    Raises:
        CheckpointError: This machine has other files than the one where the run was started.
        OneDiffError: Something cannot be loaded or used.
    """
    from onediff_ext.building.shared_graphs import SharedGraphs
    from onediff_ext.cli import model_loading
    from onediff_ext.cli.device_options import find_device
    from onediff_ext.cli.model_identity import SameFiles

    prepared = prepared or prepare_worker(arguments, identity)
    times = prepared.times
    start = time.perf_counter()
    same_files = SameFiles(arguments, identity)
    session = prepared.session
    if session is None and not arguments.eager:
        session = model_loading.open_session(arguments, identity)
    shared, pulling = None, None
    if session is not None and exchange is not None:
        device, context = find_device(arguments.device), session.build_context
        holder = name if exchange.frees_lost_holders else f"{name}-{secrets.token_hex(4)}"
        entries = session.key_entries(device)
        shared = SharedGraphs(
            exchange, holder, session.library, context.build_records, entries, device
        )
        context.share_graphs(shared)
        pulling = threading.Thread(
            target=_fetch_graphs, args=(shared, session, device), name="onediff-pull", daemon=True
        )
        pulling.start()
    image_generator = model_loading.load_image_generator(arguments, prepared.reading)
    times.mark("model")
    same_files.check()
    if session is not None:
        if pulling is not None:
            pulling.join(_PULL_S)
            times.mark("graphs fetched")
        model_loading.put_graphs_under(image_generator, arguments, session, hold_builds=hold_builds)
        times.mark("graphs")
        if shared is not None:
            threading.Thread(target=shared.push, name="onediff-push", daemon=True).start()
    ready_s = time.perf_counter() - start
    return model_loading.LoadedModel(image_generator, session, identity, ready_s, times), shared
