"""Loads the graphs that a pipeline of the same form used last time, before its first picture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onediff_ext.core.components import ComponentId
from onediff_ext.session.session import Session
from onediff_ext.store import LastKinds


class PipelineKinds:
    """The kinds of one pipeline, now and in the process before.

    A script's pipeline has no checkpoint file that is known here. Its form stands for it: what its
    models are, without their weights. It is a hint alone; a graph is used where its key fits.

    Args:
        session: The pipeline's own.
        models: Its models, not empty.
    """

    def __init__(self, session: Session, models: Sequence[tuple[ComponentId, nn.Module]]) -> None:
        self._session, self._records = session, LastKinds(session.library.folder)
        self._form = form_of(session, models)
        self._recorded = self._records.of(self._form)
        parameter = next(models[0][1].parameters(), None)
        if parameter is not None and self._recorded:
            session.read_ahead.start(lambda: self._recorded, parameter.device)

    def record(self) -> None:
        """Record the kinds that have a graph, if they are others than before."""
        kinds = [kind for kind in self._session.kinds if kind.graph is not None]
        digests = [kind.key.digest for kind in kinds]
        if digests and digests != self._recorded:
            self._recorded = digests
            self._records.record(self._form, digests)


def form_of(session: Session, models: Sequence[tuple[ComponentId, nn.Module]]) -> str:
    """Return a digest of what decides a pipeline's kinds, as far as it is known before a picture.

    Args:
        session: Its backend and precision count.
        models: The classes, configurations and dtypes of these models count.
    """
    described = [
        (str(identity), _name(model), _config(model), _dtypes(model)) for identity, model in models
    ]
    text = json.dumps([session.backend.name, session.options.precision, described], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    known = config if isinstance(config, Mapping) else {}
    return {name: known[name] for name in sorted(known) if not name.startswith("_")}


def _dtypes(model: nn.Module) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in model.parameters()})
