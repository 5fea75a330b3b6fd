"""Reports of graphs that were wrong in use, for an issue of this project."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import torch

from onediff_ext.core.errors import StoreError
from onediff_ext.core.kind_key import KindKey
from onediff_ext.store.atomic_write import publish
from onediff_ext.store.folder import StoreFolder

logger = logging.getLogger(__name__)

_SCHEMA = 1


def write_incident(
    folder: StoreFolder, what: str, problem: str, key: KindKey | None
) -> Path | None:
    """Write what is known of a wrong result beside the graphs.

    Args:
        folder: Of the store.
        what: The kind of block, or the model.
        problem: What was seen.
        key: Of the kind.

    Returns:
        The file, or None if it could not be written.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{key.digest[:8] if key else 'replay'}.json"
    path = folder.root / "incidents" / name
    report = {
        "schema": _SCHEMA,
        "what": what,
        "problem": problem,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "key": None if key is None else dict(key.entries),
    }
    try:
        folder.prepare()
        path.parent.mkdir(exist_ok=True)
        publish(folder, path, [json.dumps(report, indent=2).encode()])
    except (StoreError, OSError) as exc:
        logger.warning("No report could be written: %s", exc)
        return None
    return path
