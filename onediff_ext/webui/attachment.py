"""The models of a host with graphs under them, for the length of one job."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from onediff_ext.engine.kinds import Kind
from onediff_ext.engine.patch import Patches
from onediff_ext.hosts.webui import WebUIHost
from onediff_ext.service.component import Component
from onediff_ext.service.session import Session


class Attachment:
    """Graphs under some models. Suspended, every attribute is as it was before.

    Args:
        host: Adds what it needs itself, such as the merging of a pending LoRA.
        session: Who owns the kinds.
        models: By component name, as `WebUIHost.models` gives them.
        state: `WebUIHost.state` for which this is right.
    """

    def __init__(
        self,
        host: WebUIHost,
        session: Session,
        models: list[tuple[str, nn.Module]],
        state: Hashable,
    ) -> None:
        self._host, self.session, self._models, self._state = host, session, models, state
        self._patches = Patches()
        self._components = [Component(name, model, session) for name, model in models]

    def fits(self, session: Session, models: list[tuple[str, nn.Module]], state: Hashable) -> bool:
        """Whether this is what these models need now."""
        return (
            session is self.session
            and state == self._state
            and len(models) == len(self._models)
            and all(
                name == known and model is module
                for (name, model), (known, module) in zip(models, self._models, strict=True)
            )
        )

    def is_gone(self) -> bool:
        """Whether the host has given these models up: their weights are nowhere."""
        return any(p.is_meta for _, model in self._models for p in model.parameters())

    def install(self) -> None:
        """Put the graphs under the models."""
        try:
            for component in self._components:
                component.install()
                self._host.attach(self._patches, component.model, component.name)
        except BaseException:
            self.undo()
            raise

    def suspend(self) -> None:
        """Leave every attribute as it was before `install`, which may come again."""
        self._patches.undo()
        for component in reversed(self._components):
            component.suspend()

    def undo(self) -> None:
        """The same for good: captures are dropped too."""
        self._patches.undo()
        for component in reversed(self._components):
            component.remove()

    def kinds(self) -> list[Kind]:
        """The kinds that the attached models have used."""
        return [kind for component in self._components for kind in component.kinds()]
