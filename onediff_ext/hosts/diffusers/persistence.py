"""`save_pipe` and `load_pipe`: export and import the graphs of one pipeline as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from onediff_ext.core.errors import OneDiffError, OptionError, StoreError
from onediff_ext.core.options import parse_ignores
from onediff_ext.core.typed_paths import given_path
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.hosts.diffusers.compile import compile_pipe, compiled_state, undo_compile
from onediff_ext.hosts.diffusers.probe import probe

Pipe = TypeVar("Pipe")

_ARCHIVE, _LISTING, _SCHEMA = "graphs.zip", "pipe.json", 1


def save_pipe(
    pipe: Any,
    dir: str | Path = "cached_pipe",
    *,
    ignores: object = (),
    overwrite: bool = True,
) -> Path:
    """Write the graphs that a compiled pipeline uses into a folder.

    The store keeps them anyway; the folder is for another machine of the same kind.
    Components that have not run yet run once on noise, and missing graphs are built.

    Args:
        pipe: A pipeline compiled by `compile_pipe`.
        dir: The folder; created if it does not exist.
        ignores: Components whose graphs are left out, as in `compile_pipe`.
        overwrite: Allow a folder that already holds saved graphs.

    Returns:
        The folder.

    Raises:
        OptionError: The pipeline is not compiled, an argument has a wrong type, or the folder holds
            graphs and `overwrite` is False.
        StoreError: The folder cannot be written.
    """
    compiled = compiled_state(pipe)
    if compiled is None:
        raise OptionError("This pipeline is not compiled.", "Call compile_pipe(pipe) first.")
    folder, ignored = given_path(dir, "dir"), parse_ignores(ignores)
    if (folder / _LISTING).exists() and not overwrite:
        raise OptionError(f"{folder} already holds saved graphs.", "Pass overwrite=True.")
    session = compiled.session
    probe(pipe)
    session.build_missing()
    wanted = [c for c in compiled.components if c.role not in ignored]
    kinds = {kind.key.digest: kind for c in wanted for kind in c.kinds()}
    usable = [d for d, kind in kinds.items() if kind.state is not KindState.FAILED]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(f"{folder} cannot be made: {exc.strerror}.", "Name another.") from exc
    session.library.export(folder / _ARCHIVE, usable)
    listing = {
        "schema": _SCHEMA,
        "kinds": {d: kinds[d].label for d in usable},
        "eager": {kinds[d].label: kinds[d].reason for d in kinds if d not in usable},
    }
    (folder / _LISTING).write_text(json.dumps(listing, indent=1), encoding="utf-8")
    return folder


def load_pipe(pipe: Pipe, dir: str | Path = "cached_pipe") -> Pipe:
    """Import the graphs of `save_pipe` into the store and use them in a pipeline.

    Graphs are native code. Calling this function trusts the folder like a program, so load only
    folders from a trusted source.

    This returns before they are used: a worker tries each imported graph once on this
    machine, when it would otherwise build, and blocks run eager until then. Graphs that
    the store already has stay as they are.

    Args:
        pipe: Any pipeline; it is compiled with default options if it is not compiled yet.
        dir: A folder that `save_pipe` wrote.

    Returns:
        The same pipeline.

    Raises:
        OptionError: It is no pipeline, or `dir` is no path.
        StoreError: The folder holds no saved graphs, they are damaged, or the store has
            no room for them. Graphs of another machine or version are no error: they are
            not found, and built when needed.
    """
    archive = given_path(dir, "dir") / _ARCHIVE
    if not archive.exists():
        raise StoreError(f"{dir} holds no saved graphs.", "Name a folder that save_pipe wrote.")
    compiled = compiled_state(pipe)
    is_new = compiled is None
    compiled = compiled or compiled_state(compile_pipe(pipe))
    assert compiled is not None
    try:
        compiled.session.library.import_archive(archive, trust=True)
    except OneDiffError:
        if is_new:
            undo_compile(pipe)
        raise
    compiled.session.load_missing()
    return pipe
