"""Loads the graphs that a pipeline of the same form used last time, before its first picture."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onediff_ext.core.components import ComponentId
from onediff_ext.engine.blocks.block_kind import KindState
from onediff_ext.session.graph_savings import USUAL_LOAD_S, saved_by_graphs_s
from onediff_ext.session.session import Session
from onediff_ext.store import COUNTED_PICTURES, LastKinds, LastUse


class PipelineKinds:
    """The kinds of one pipeline, now and in the process before.

    A script's pipeline has no checkpoint file that is known here. Its form stands for it: what its
    models are, without their weights. It is a hint alone; a graph is used where its key fits.

    On a GPU, the first picture waits for the graphs only if they are likely to save more time in
    this process than their loading takes. A script of one quick picture draws it eager. The process
    before, with a pipeline of this form, tells how many pictures to expect.
    On a CPU the first picture always waits: steps take longer there.

    Args:
        session: The pipeline's own.
        models: Its models, not empty.
    """

    def __init__(self, session: Session, models: Sequence[tuple[ComponentId, nn.Module]]) -> None:
        self._session, self._records = session, LastKinds(session.library.folder)
        self._form = form_of(session, models)
        last = self._last = self._records.of(self._form)
        self._pictures = 0
        parameter = next(models[0][1].parameters(), None)
        if parameter is None or not last.kinds:
            return
        waits = parameter.device.type == "cpu" or not last.saved_s
        session.read_ahead.start(
            lambda: last.kinds,
            parameter.device,
            patience_s=math.inf if waits else last.saved_s * max(1, last.pictures),
            expected_s=last.load_s or USUAL_LOAD_S,
        )

    def record(self) -> None:
        """Record the last picture's kinds, if they are others than before, and its time."""
        self._pictures += 1
        kinds = [k for k in self._session.kinds if k.state is not KindState.FAILED]
        digests = tuple(kind.key.digest for kind in kinds)
        steps_s = self._session.timer.steps_s
        saved_s = saved_by_graphs_s(kinds, steps_s) if self._pictures == 1 else 0.0
        load_s = self._session.read_ahead.load_s
        use = LastUse(
            digests,
            saved_s or self._last.saved_s,
            load_s or self._last.load_s,
            min(self._pictures, COUNTED_PICTURES),
        )
        if digests and use != self._last:
            self._last = use
            self._records.record(self._form, use)


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
