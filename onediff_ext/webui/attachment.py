"""The models of a host with graphs under them, for the length of one job."""

from __future__ import annotations

from torch import nn

from onediff_ext.engine.kinds import Kind
from onediff_ext.engine.patch import Patches
from onediff_ext.hosts.webui import WebUIHost
from onediff_ext.service.component import Component
from onediff_ext.service.session import Session


class Attachment:
    """Graphs under some models; `undo` leaves every attribute as it was.

    Args:
        host: Adds what it needs itself, such as the merging of a pending LoRA.
        session: Who owns the kinds.
        models: By component name, as `WebUIHost.models` gives them.
    """

    def __init__(
        self, host: WebUIHost, session: Session, models: list[tuple[str, nn.Module]]
    ) -> None:
        self.session, self._models = session, models
        self._patches = Patches()
        self.components: list[Component] = []
        try:
            for name, model in models:
                component = Component(name, model, session)
                self.components.append(component)
                component.install()
                host.attach(self._patches, model, name)
        except BaseException:
            self.undo()
            raise

    def serves(self, session: Session, models: list[tuple[str, nn.Module]]) -> bool:
        """Whether this is what these models need already."""
        return (
            session is self.session
            and len(models) == len(self._models)
            and all(
                name == known and model is module
                for (name, model), (known, module) in zip(models, self._models, strict=True)
            )
        )

    def undo(self) -> list[str]:
        """Take the graphs away again, last change first.

        Returns:
            Attributes that somebody else has replaced since, and that were left alone.
        """
        left = self._patches.undo()
        while self.components:
            self.components.pop().remove()
        return left

    def kinds(self) -> list[Kind]:
        """The kinds that the attached models have used."""
        return [kind for component in self.components for kind in component.kinds()]
