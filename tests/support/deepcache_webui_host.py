"""A WebUI stand-in with a full UNet that draws with DeepCache, for A1111, Forge and reForge."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.a1111.host import A1111Host
from onediff_ext.hosts.forge.host import ForgeHost
from onediff_ext.hosts.forge.reforge import ReForgeHost
from onediff_ext.webui.graphs_for_jobs import GraphsForJobs
from tests.support.ldm_models import LDM_UNETS
from tests.support.ldm_stand_in import written_in
from tests.support.sampler_stand_in import sample

MEDIUM = DeepCacheOptions(3)
ADAPTERS = {"a1111": A1111Host, "forge": ForgeHost, "reforge": ReForgeHost}

# Where each host's own UNets come from.
HOMES = {
    "a1111": "ldm.modules.diffusionmodules.openaimodel",
    "forge": "backend.nn.unet",
    "reforge": "ldm_patched.ldm.modules.diffusionmodules.openaimodel",
}


class Job:
    """`p`: a picture of 12 steps."""

    steps, scheduler, is_hr_pass = 12, "Automatic", False

    def close(self) -> None:
        """Holds no resources."""


class DeepCacheWebUI:
    """A stand-in of a host with a UNet of the full form, and the graphs for its jobs."""

    def __init__(self, name: str, stand_in: Any, options: CompileOptions) -> None:
        self.name, self.stand_in, self.options = name, stand_in, options
        self.new_unet()
        self.graphs = GraphsForJobs(ADAPTERS[name]())
        self.decides: list[str] = []

    @property
    def unet(self) -> Any:
        if self.name == "a1111":
            return self.stand_in.model.model.diffusion_model
        return self.stand_in.unet

    def new_unet(self) -> None:
        """Another checkpoint: the same module in A1111, another one in the others."""
        unet = LDM_UNETS[self.name]()
        cls = type(unet)
        if cls.forward.__globals__["__name__"] != HOMES[self.name]:
            cls.forward = written_in(cls.forward, HOMES[self.name])
        if self.name == "a1111":
            model = self.stand_in.model
            if type(model.model.diffusion_model) is type(unet):
                with torch.no_grad():
                    for parameter in self.unet.parameters():
                        parameter.mul_(1.1)
                model.sd_checkpoint_info = copy.copy(model.sd_checkpoint_info)
                model.sd_checkpoint_info.name_for_extra += "-b"
            else:
                model.model.diffusion_model = unet
        else:
            type(unet).__name__ = "UNetModel"
            base = self.stand_in.engine.forge_objects.unet.model
            if isinstance(base.diffusion_model, type(unet)):
                with torch.no_grad():
                    for parameter in unet.parameters():
                        parameter.mul_(1.1)
            base.diffusion_model = unet

    def lora(self, strength: float) -> None:
        """A LoRA as each host keeps it."""
        if self.name == "a1111":
            self.stand_in.lora.module.loaded_networks = [
                SimpleNamespace(name="a", te_multiplier=1.0, unet_multiplier=strength, dyn_dim=None)
            ]
        elif self.name == "forge":
            self.patcher.lora_patches = {("a.safetensors", strength, 1.0, False): ()}
        else:
            self.patcher.patches_uuid = object()
        with torch.no_grad():
            self.unet.input_blocks[1][0].first.weight.mul_(1 + strength)

    @property
    def patcher(self) -> Any:
        return self.stand_in.engine.forge_objects.unet

    def call(self, x: Any, timesteps: Any, context: Any, **arguments: Any) -> torch.Tensor:
        """One call of the UNet, as the host makes it."""
        if self.name != "a1111":
            arguments.setdefault("transformer_options", {})
        with torch.no_grad() if self.name == "a1111" else torch.inference_mode():
            result: torch.Tensor = self.unet(x, timesteps, context=context, **arguments)
            return result.clone()

    def draw(
        self, deepcache: DeepCacheOptions | None, job: Job | None = None, **how: Any
    ) -> torch.Tensor:
        """A whole job with one pass; None leaves the extension out of it."""
        if deepcache is None:
            return sample(lambda _: None, self.call, Job(), **how)
        p = job or Job()
        self.graphs.begin(p, self.options, deepcache=deepcache)
        latent = self.run(p, **how)
        self.graphs.after_sampling(p)
        self.graphs.end(p)
        return latent

    def run(self, p: Job, **how: Any) -> torch.Tensor:
        """One pass of a job that has begun."""
        self.graphs.before_sampling(p)
        return sample(self.graphs.before_step, self.call, p, **how)

    @property
    def calls(self) -> tuple[int, int]:
        """Full and shallow calls of the last job."""
        counts = self.graphs.deepcache.counts
        return counts["full"], counts["shallow"]

    @property
    def features_bytes(self) -> int:
        parts = [*self.graphs.models.attached, *self.graphs.models.suspended]
        return sum(part.deepcache.size_bytes for part in parts)

    def attributes(self) -> dict[str, Any]:
        return {
            name: (
                {key: id(value) for key, value in vars(module).items()},
                list(module._modules.items()),
                len(module._forward_hooks),
                len(module._forward_pre_hooks),
            )
            for name, module in self.unet.named_modules()
        }
