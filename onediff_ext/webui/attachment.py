"""One of the host's models with graphs under it, for the length of one job."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

from torch import nn

from onediff_ext.core.components import ComponentId
from onediff_ext.engine.blocks.block_kind import BlockKind
from onediff_ext.engine.patches import Patches
from onediff_ext.hosts.base import WebUIHost
from onediff_ext.session.model_component import Component
from onediff_ext.session.session import Session
from onediff_ext.webui.deepcache import WebUIDeepCache
from onediff_ext.webui.guidance import WebUIGuidance


class Attachment:
    """Graphs under one model. While suspended, every attribute is the host's own.

    Args:
        host: Adds what it needs itself, such as the merging of a pending LoRA.
        session: Who owns the kinds.
        identity: Of the component, from `WebUIHost.models`.
        model: The host's module.
        state: The `WebUIHost.state` for which these graphs are valid.

    Attributes:
        component: The model with its block runners and CUDA graphs.
        deepcache: DeepCache around the model, for a UNet whose job wants it.
        guidance: Guidance steps around that, likewise.
    """

    def __init__(
        self,
        host: WebUIHost,
        session: Session,
        identity: ComponentId,
        model: nn.Module,
        state: Hashable,
    ) -> None:
        self._host, self.session, self._state = host, session, state
        self._patches = Patches()
        self.component = Component(identity, model, session)
        owner = host.owner(identity, model)
        self._owner = None if owner is None else weakref.ref(owner)
        self.deepcache = WebUIDeepCache(model)
        self.guidance = WebUIGuidance(model)

    @property
    def owner(self) -> object | None:
        """The object that dies with the model (`WebUIHost.owner`); None without one."""
        return None if self._owner is None else self._owner()

    def fits(
        self, session: Session, identity: ComponentId, model: nn.Module, state: Hashable
    ) -> bool:
        """Whether this is what that model needs now."""
        return (
            session is self.session
            and model is self.component.model
            and identity == self.component.identity
            and state == self._state
        )

    def is_gone(self) -> bool:
        """Whether the host has given the model up: its weights are on the meta device."""
        return any(parameter.is_meta for parameter in self.component.model.parameters())

    def install(self) -> None:
        """Put the graphs under the model."""
        try:
            self.component.install()
            self._host.attach(self._patches, self.component.model, self.component.identity)
        except BaseException:
            self.undo()
            raise

    def suspend(self) -> None:
        """Restore every attribute from before `install`, which may be called again."""
        self._patches.undo()
        self.guidance.end_run()
        self.deepcache.remove()
        self.component.suspend()

    def undo(self) -> None:
        """Restore every attribute for good; the CUDA graphs are dropped too."""
        self._patches.undo()
        self.guidance.end_run()
        self.deepcache.forget()
        self.component.remove()

    def kinds(self) -> list[BlockKind]:
        """The block kinds that the model's blocks have used."""
        return self.component.kinds()
