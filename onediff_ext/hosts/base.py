"""The port to a WebUI; one adapter for each host implements it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.shapes import BatchShape
from onediff_ext.engine.blocks.family import BlockFamily
from onediff_ext.engine.blocks.weight_slots import WrapperRule
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.validity.foreign_code import defining_module, extension_of, replaced_methods


@dataclass(frozen=True)
class HostCheckpoint:
    """The checkpoint that a host draws with now.

    Args:
        name: As the host shows it.
        digest: The host's short hash, or ``""`` while it has none.
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


def control_components(networks: Iterable[Any]) -> Iterator[tuple[ComponentId, Any]]:
    """The ControlNets of one job, in order, as components."""
    for index, network in enumerate(networks):
        yield ComponentId(Role.CONTROLNET, index), network


class WebUIHost(ABC):
    """One WebUI: which models draw, how they are called, and what makes them run eager.

    Only an adapter imports the host's own packages, inside its methods. All changes to the host go
    through `Patches`, and are undone whenever a job ends or fails.
    """

    name: str
    # Roles of components that the host, or an extension, may give up after any job. Nothing is kept
    # of them unless they have an owner, so their memory is free then.
    host_owned: frozenset[Role] = frozenset()

    @abstractmethod
    def families(self) -> Sequence[BlockFamily]:
        """The block classes of this host's models."""

    @abstractmethod
    def rules(self) -> Sequence[WrapperRule]:
        """Wrappers that the host puts around a block's layers."""

    @abstractmethod
    def checkpoint(self) -> HostCheckpoint | None:
        """The checkpoint that is loaded now, or None before the first load."""

    def chosen_path(self) -> str:
        """The file of the checkpoint that the next picture loads; ``""`` if nothing tells."""
        from modules import sd_models, shared

        info = sd_models.checkpoint_aliases.get(shared.opts.sd_model_checkpoint)
        return str(getattr(info, "filename", ""))

    @abstractmethod
    def models(self, ignores: frozenset[str]) -> list[tuple[ComponentId, nn.Module]]:
        """The modules that draw now.

        Args:
            ignores: Roles to leave out, as `onediff_ext.core.options.parse_ignores` returns them.
        """

    @abstractmethod
    def refusal_reason(self, job: Any) -> str | None:
        """Why a whole job has to run eager (offloading, quantized weights), or None.

        Args:
            job: The host's processing object ``p``; None outside a job.
        """

    @abstractmethod
    def attach(self, patches: Patches, model: nn.Module, component: ComponentId) -> None:
        """Make the further changes that this host needs while a model runs through graphs.

        Such as a hook that merges pending LoRAs before each forward.

        Args:
            patches: Makes the changes and undoes them.
            model: The host's module.
            component: What it is.
        """

    def state(self) -> Hashable:
        """The host's state that changes results, besides the models and their weights.

        Such as settings that reach into layers, and class-level patches. When it changes, blocks
        are inspected again and CUDA graphs are dropped. Cheap, since it is asked before each step.
        """
        return None

    def weights(self) -> Hashable:
        """A value that differs when the models have other weights: checkpoint and LoRAs.

        Says what the host knows. Cheap, since it is asked before each step.
        """
        checkpoint = self.checkpoint()
        return None if checkpoint is None else (checkpoint.name, checkpoint.digest)

    def split_calls_reason(self, denoiser: object) -> str | None:
        """Why the UNet's calls may be those of parts of a picture, or None.

        Extensions draw a picture in tiles by taking the place of a step between sampler and UNet.

        Args:
            denoiser: The host's CFG denoiser.
        """
        for step in (denoiser, getattr(denoiser, "inner_model", None)):
            for method in replaced_methods(step).values():
                return self.own_way_reason(method)
        return None

    @staticmethod
    def own_way_reason(function: object) -> str:
        """Say whose function stands between sampler and UNet.

        Args:
            function: What an extension put there.
        """
        name = extension_of(function) or defining_module(function)
        return f"{name} calls the UNet in its own way"

    def owner(self, component: ComponentId, model: nn.Module) -> object | None:  # noqa: ARG002
        """The object that dies when the host gives a model up.

        Only weak references to it are kept.

        Args:
            component: What the model is.
            model: The host's module, which it draws with now.

        Returns:
            The object; None if the host keeps the model for the next checkpoint, or if nothing
            tells.
        """
        return None

    def device(self) -> torch.device | None:
        """Where the host computes; None for where its models are now.

        Hosts that offload keep models on the CPU until they are needed.
        """
        return None

    def share_memory(  # noqa: B027
        self,
        patches: Patches,
        make_room: Callable[[int, torch.device], None],
        returnable: Callable[[], int],
    ) -> None:
        """Let the host's memory management take memory from CUDA graphs. Most hosts have none.

        Args:
            patches: Makes the changes and undoes them.
            make_room: Takes the bytes that the host is about to need, and the device.
            returnable: How many bytes of tensors would be given back.
        """

    def speed_up_moves(self, patches: Patches) -> None:  # noqa: B027
        """Let whole models move between main memory and the GPU faster. Most hosts move none.

        Args:
            patches: Makes the changes and undoes them.
        """

    @abstractmethod
    def step(self, shape: BatchShape, noise: torch.Generator) -> None:
        """One forward of the UNet on noise, with CFG, as the sampler would call it; for warm-up.

        Must not change what the host draws next.

        Args:
            shape: Of the image.
            noise: Makes inputs that differ at each call.
        """

    @abstractmethod
    def vae_step(self) -> None:
        """One small encoding and decoding by the VAE, for warm-up.

        The size is fixed, since the VAE's block kinds do not depend on it.
        """

    def run_exclusively(self, task: Callable[[], None]) -> None:
        """Run a task as one of the host's own jobs: alone, and on a thread that the host allows.

        The default has no queue and runs it at once.
        """
        task()

    def is_interrupted(self) -> bool:
        """Whether the user, or the choice *stop*, has ended the current job before its end."""
        state = getattr(sys.modules.get("modules.shared"), "state", None)
        return bool(getattr(state, "interrupted", False) or getattr(state, "skipped", False))

    def is_waited_for(self) -> bool:
        """Whether other jobs wait for the current one to end."""
        queue = getattr(sys.modules.get("modules.call_queue"), "queue_lock", None)
        return bool(getattr(queue, "_pending_threads", ()))  # a FIFOLock in all hosts
