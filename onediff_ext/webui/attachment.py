"""One model of a host with graphs under it, for the length of one job."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from torch import nn

from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.base import WebUIHost
from onediff_ext.session.model_component import Component
from onediff_ext.session.session import Session
from onediff_ext.webui.deepcache import WebUIDeepCache


class Attachment:
    """Graphs under one model. Suspended, every attribute is as it was before.

    Args:
        host: Adds what it needs itself, such as the merging of a pending LoRA.
        session: Who owns the kinds.
        name: The component, as `WebUIHost.models` gives it.
        model: The host's module.
        state: `WebUIHost.state` for which this is right.

    Attributes:
        component: The model with its runners and captures.
        owner: As `WebUIHost.owner`, while it lives.
        reuse: DeepCache around it, for a UNet that a job wants it for.
    """

    def __init__(
        self, host: WebUIHost, session: Session, name: str, model: nn.Module, state: Hashable
    ) -> None:
        self._host, self.session, self._state = host, session, state
        self._patches = Patches()
        self.component = Component(name, model, session)
        owner = host.owner(name, model)
        self._owner = None if owner is None else weakref.ref(owner)
        self.reuse = WebUIDeepCache(model)

    @property
    def owner(self) -> object | None:
        return None if self._owner is None else self._owner()

    def fits(self, session: Session, name: str, model: nn.Module, state: Hashable) -> bool:
        """Whether this is what that model needs now."""
        return (
            session is self.session
            and model is self.component.model
            and name == self.component.name
            and state == self._state
        )

    def is_gone(self) -> bool:
        """Whether the host has given the model up: its weights are nowhere."""
        return any(parameter.is_meta for parameter in self.component.model.parameters())

    def install(self) -> None:
        """Put the graphs under the model."""
        try:
            self.component.install()
            self._host.attach(self._patches, self.component.model, self.component.name)
        except BaseException:
            self.undo()
            raise

    def suspend(self) -> None:
        """Leave every attribute as it was before `install`, which may come again."""
        self._patches.undo()
        self.reuse.remove()
        self.component.suspend()

    def undo(self) -> None:
        """The same for good: captures are dropped too."""
        self._patches.undo()
        self.reuse.forget()
        self.component.remove()

    def kinds(self) -> list[BlockKind]:
        """The kinds that the model's blocks have used."""
        return self.component.kinds()
