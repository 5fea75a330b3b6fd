"""As much of Forge, Neo and reForge as their adapters touch, with their habits: models that come
and go, patchers in ``forge_objects``, weights that are inference tensors and are replaced."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from onediff_ext.hosts.base import WebUIHost
from onediff_ext.hosts.forge.host import ForgeHost
from onediff_ext.hosts.forge.reforge import ReForgeHost
from onediff_ext.hosts.neo.host import NeoHost
from tests.support import forge_blocks_stand_in as blocks

ADAPTERS: dict[str, type[WebUIHost]] = {
    "forge": ForgeHost,
    "neo": NeoHost,
    "reforge": ReForgeHost,
}
"""The adapter of each host that the stand-in can be."""


class FakeInitialModel:
    """Forge's placeholder before the first checkpoint is loaded."""


class SD15:
    """The class of a model's configuration tells its architecture."""


class IntegratedAutoencoderKL(nn.Module):
    """Of Forge and Neo, by its name."""


class SDXLRefiner:
    """Another one."""


class FakeProcessing:
    """`p`: what a job is to a script."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakePatcher:
    """A ModelPatcher: the model, where it computes, its LoRAs and ControlNets."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.load_device = torch.device("cpu")
        self.online, self.controls = False, list[Any]()

    def has_online_lora(self) -> bool:
        return self.online

    def list_controlnets(self) -> list[Any]:
        return self.controls


class FakeEngine:
    """`shared.sd_model`: created again for each checkpoint."""

    def __init__(
        self,
        classes: SimpleNamespace,
        seed: int,
        config: object,
        transformer: Callable[[], nn.Module] | None = None,
    ) -> None:
        with torch.inference_mode():
            torch.manual_seed(seed)
            unet, encoder, decoder = (
                (transformer or classes.UNet)(),
                classes.Half(3, 8, stride=8),
                classes.Half(4, 3),
            )
        classes.UNet.__name__ = "UNetModel"
        vae = IntegratedAutoencoderKL()
        vae.encoder, vae.decoder = encoder.eval(), decoder.eval()
        base = nn.Module()
        base.diffusion_model = unet
        base.storage_dtype = base.computation_dtype = torch.float32
        base.manual_cast_dtype, base.get_dtype = None, lambda: torch.float32
        base.model_config = self.model_config = config
        self.sd_checkpoint_info = SimpleNamespace(
            name_for_extra=f"fake-{seed}",
            shorthash=f"{seed:064x}"[:10],
            sha256=f"{seed + 1:064x}",
            filename=f"/models/fake-{seed}.safetensors",
        )
        self.forge_objects = SimpleNamespace(
            unet=FakePatcher(base),
            vae=SimpleNamespace(
                first_stage_model=vae,
                patcher=FakePatcher(vae),
                device=torch.device("cpu"),
                vae_dtype=torch.float32,
                latent_channels=4,
            ),
        )


class ForgeStandIn:
    """The fake host, and how a job of it draws."""

    def __init__(self, name: str, classes: SimpleNamespace) -> None:
        self.name, self.classes = name, classes

    @property
    def engine(self) -> Any:
        return _module("modules.sd_models").model_data.sd_model

    @property
    def unet(self) -> nn.Module:
        unet: nn.Module = self.engine.forge_objects.unet.model.diffusion_model
        return unet

    def load(
        self,
        seed: int,
        config: object | None = None,
        transformer: Callable[[], nn.Module] | None = None,
    ) -> None:
        """Give up the model, then load another one, as Forge does.

        Args:
            seed: Of the weights.
            config: The host's class of checkpoint.
            transformer: Makes what takes the UNet's place.
        """
        data = _module("modules.sd_models").model_data
        if data.sd_model is not None:
            data.sd_model = None
            gc.collect()
        data.sd_model = FakeEngine(self.classes, seed, config or SD15(), transformer)

    def start_without_model(self) -> None:
        _module("modules.sd_models").model_data.sd_model = FakeInitialModel()

    def merge_lora(self, strength: float) -> None:
        """Replace Parameters by others, as the hosts do for a LoRA."""
        with torch.inference_mode():
            for module in self.unet.modules():
                weight = module._parameters.get("weight")
                if weight is None or weight.ndim < 2:
                    continue
                original = vars(module).get("_test_original", weight)
                vars(module)["_test_original"] = original
                module._parameters["weight"] = nn.Parameter(original * (1 + strength))

    def draw(
        self, height: int = 8, width: int = 8, batch: int = 2, tokens: int = 77, **options: Any
    ) -> torch.Tensor:
        """One step on noise that depends on the shape only."""
        noise = torch.Generator().manual_seed(1)
        x = torch.randn(batch, 4, height, width, generator=noise)
        context = torch.randn(batch, tokens, 24, generator=noise)
        with torch.inference_mode():
            result: torch.Tensor = self.unet(
                x, torch.full((batch,), 321.0), context=context, transformer_options=options
            )
            return result.clone()

    def decode(self, height: int = 8, width: int = 8) -> torch.Tensor:
        z = torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(2))
        with torch.inference_mode():
            result: torch.Tensor = self.engine.forge_objects.vae.first_stage_model.decoder(z)
            return result.clone()

    def attributes(self, *others: object) -> dict[str, Any]:
        """Everything that a patch could change, with identities."""
        objects = self.engine.forge_objects
        found: dict[str, Any] = {}
        for root in (objects.unet.model, objects.vae.first_stage_model):
            for name, module in root.named_modules():
                found[f"{id(root)} {name}"] = (
                    type(module),
                    {k: id(v) for k, v in vars(module).items()},
                    list(module._forward_hooks),
                    list(module._forward_pre_hooks),
                    {k: id(v) for k, v in module._parameters.items()},
                )
        for index, other in enumerate(others):
            found[f"object {index}"] = dict(vars(other))
        for name, module in self.classes.modules.items():
            found[name] = {k: id(v) for k, v in vars(module).items()}
        return found


@torch.inference_mode()
def load_state_dict(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Neo's: writes into the weights that are there."""
    model.load_state_dict(weights)


@contextmanager
def running(name: str) -> Iterator[ForgeStandIn]:
    """The fake host in `sys.modules`, with a checkpoint loaded.

    Args:
        name: ``"forge"``, ``"neo"`` or ``"reforge"``.
    """
    with blocks.installed(name) as classes:
        host = ForgeStandIn(name, classes)
        fakes: dict[str, dict[str, Any]] = {
            "modules": {},
            "modules.call_queue": {"queue_lock": threading.Lock()},
            "modules.sd_models": {
                "model_data": SimpleNamespace(sd_model=None, get_sd_model=lambda: None),
                "forge_model_reload": lambda: None,
            },
        }
        memory = {"load_models_gpu": lambda models: None}
        if name != "reforge":
            fakes["backend.memory_management"] = memory
        else:
            fakes["ldm_patched.modules"] = {}
            fakes["ldm_patched.modules.model_management"] = memory
        if name == "neo":
            fakes["backend.args"] = {"dynamic_args": sys.modules["backend.args"].dynamic_args}
            fakes["backend.state_dict"] = {"load_state_dict": load_state_dict}
        before = {name: sys.modules.get(name) for name in fakes}
        for module_name, values in fakes.items():
            module = sys.modules[module_name] = ModuleType(module_name)
            vars(module).update(values)
            parent, _, leaf = module_name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)
        try:
            host.load(seed=0)
            yield host
        finally:
            for module_name, old in before.items():
                if old is None:
                    sys.modules.pop(module_name, None)
                else:
                    sys.modules[module_name] = old


def _module(name: str) -> Any:
    return sys.modules[name]
