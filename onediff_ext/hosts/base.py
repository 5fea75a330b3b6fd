"""What the extension needs from a WebUI; one adapter for each host implements it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.patches import Patches


@dataclass(frozen=True)
class HostCheckpoint:
    """The checkpoint that a host draws with now.

    Args:
        name: As the host shows it.
        digest: The host's short hash, or ``""`` when it has none yet.
        architecture: ``"sd1"``, ``"sd2"``, ``"sdxl"``, ``"sdxl-refiner"`` or ``"unknown"``.
        content_hash: SHA-256 of its file, 64 hexadecimal digits, or ``""`` when the host has
            not computed it.
        path: Its file.
    """

    name: str
    digest: str
    architecture: str
    content_hash: str = ""
    path: str = ""


def control_components(networks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The ControlNets of one job as components with their names."""
    for number, network in enumerate(networks, 1):
        yield ("controlnet" if number == 1 else f"controlnet {number}"), network


class WebUIHost(ABC):
    """One WebUI: which models draw, how they are called, and what makes them run eager.

    Only an adapter imports the host's own packages, inside its methods. All changes
    to the host go through `Patches`, and are undone when a job ends, however it ends.
    """

    name: str
    # Beginnings of the names of components that the host, or an extension, may give up after any
    # job: nothing is kept of them unless they have an owner, so that their memory is free then.
    host_owned: tuple[str, ...] = ()

    @abstractmethod
    def families(self) -> Sequence[BlockFamily]:
        """The block classes of this host's models."""

    @abstractmethod
    def rules(self) -> Sequence[WrapperRule]:
        """Wrappers that the host puts around a block's layers."""

    @abstractmethod
    def checkpoint(self) -> HostCheckpoint | None:
        """What is loaded now, or None before the first load."""

    @abstractmethod
    def models(self, ignores: frozenset[str]) -> list[tuple[str, nn.Module]]:
        """The modules that draw now, by component name (`onediff_ext.core.options.COMPONENTS`)."""

    @abstractmethod
    def refusal_reason(self, job: Any) -> str | None:
        """Why the whole of a job has to run eager (offloading, quantised weights), or None.

        Args:
            job: The host's processing object ``p``; None outside a job.
        """

    @abstractmethod
    def attach(self, patches: Patches, model: nn.Module, component: str) -> None:
        """Make whatever further changes this host needs while `model` runs through graphs,
        such as having pending LoRA weights merged before each forward."""

    def state(self) -> Hashable:
        """Whatever else decides what the models compute, beside themselves and their weights:
        settings that reach into layers, class-level patches. When it changes, blocks are
        looked at anew and captures are dropped. Cheap, since it is asked before each step."""
        return None

    def weights(self) -> Hashable:
        """Whose weights the models have just now, as far as the host says: checkpoint and LoRAs.
        Cheap, since it is asked before each step."""
        checkpoint = self.checkpoint()
        return None if checkpoint is None else (checkpoint.name, checkpoint.digest)

    def owner(self, component: str, model: nn.Module) -> object | None:  # noqa: ARG002
        """What dies when the host gives up a model that it draws with now; None if it keeps that
        for the next checkpoint, or does not say. Only weak references to it are kept."""
        return None

    @abstractmethod
    def step(self, shape: BatchShape, noise: torch.Generator) -> None:
        """One forward of the UNet on noise, with CFG, as the sampler would call it; for warm-up.

        All inputs are others at each call. Must not change what the host draws next.
        """

    @abstractmethod
    def vae_step(self) -> None:
        """One small encoding and decoding by the VAE, for warm-up: its kinds do not depend on the
        size."""

    def run_exclusively(self, task: Callable[[], None]) -> None:
        """Run a task as one of the host's own jobs: none beside it, on a thread that may.

        The default has no queue to wait in and just runs it.
        """
        task()

    def is_waited_for(self) -> bool:
        """Whether others wait for the job that runs now to end."""
        queue = getattr(sys.modules.get("modules.call_queue"), "queue_lock", None)
        return bool(getattr(queue, "_pending_threads", ()))  # of the FIFOLock that all hosts have
