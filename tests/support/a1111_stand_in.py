"""As much of A1111 as its adapter touches, with its habits: LoRAs merge in layers' forwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.support import ldm_stand_in

LAYERS = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.MultiheadAttention)


class FakeModel(nn.Module):
    """`shared.sd_model`: a UNet in ``model.diffusion_model`` and a VAE."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Module()
        self.model.diffusion_model = ldm_stand_in.UNetModel()
        self.first_stage_model = nn.Module()
        self.first_stage_model.encoder = ldm_stand_in.Encoder()
        self.first_stage_model.decoder = ldm_stand_in.Decoder()
        self.lowvram, self.is_sd1, self.is_sdxl, self.is_sd2 = False, True, False, False
        self.cond_stage_model_empty_prompt = torch.randn(1, 77, 24)
        self.sd_checkpoint_info = SimpleNamespace(
            name_for_extra=f"fake-{seed}", shorthash="", sha256=None, filename="fake.safetensors"
        )
        self.eval().requires_grad_(False)
        self.name_layers()

    def apply_model(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What k-diffusion's wrapper calls."""
        output: torch.Tensor = self.model.diffusion_model(x, *args, **kwargs)
        return output

    def name_layers(self) -> None:
        """Done by the built-in Lora extension whenever a checkpoint is loaded."""
        for name, module in self.model.named_modules():
            module.network_layer_name = "diffusion_model_" + name.replace(".", "_")


class FakeLora:
    """The built-in extension's module ``networks``: merges lazily, in each layer's forward."""

    def __init__(self) -> None:
        self.module = ModuleType("networks")
        self.strength = 0.0
        self._originals: dict[type, Any] = {}
        self.module.network_apply_weights = self.apply  # type: ignore[attr-defined]

    def apply(self, layer: nn.Module) -> None:
        wanted = (self.strength,) if self.strength else ()
        if getattr(layer, "network_layer_name", None) is None:
            return
        if getattr(layer, "network_current_names", ()) == wanted:
            return
        backup = getattr(layer, "network_weights_backup", None)
        if backup is None:
            backup = layer.network_weights_backup = layer.weight.clone()
        layer.weight.copy_(backup * (1 + self.strength))
        layer.network_current_names = wanted

    def patch_layers(self) -> None:
        for cls in LAYERS:
            original = self._originals[cls] = cls.forward

            def forward(
                layer: nn.Module, *args: Any, _original: Any = original, **kwargs: Any
            ) -> Any:
                self.apply(layer)
                return _original(layer, *args, **kwargs)

            ours = ldm_stand_in.written_in(forward, "networks")
            setattr(self.module, f"network_{cls.__name__}_forward", ours)
            cls.forward = ours  # type: ignore[method-assign]

    def undo(self) -> None:
        for cls, original in self._originals.items():
            cls.forward = original


class FakeProcessing:
    """`p`: what a job is to a script."""

    all_prompts: list[str] | None = None
    extra_network_data: dict[str, Any] | None = None

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeControlNet:
    """The script of Mikubill's extension: `latest_network` hooks the UNet while a job runs."""

    def __init__(self) -> None:
        self.latest_network: Any = None

    def hook(self, unet: nn.Module, strength: float, network: nn.Module | None) -> None:
        def forward(
            unet: Any, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor
        ) -> torch.Tensor:
            if network is not None:
                network(x, timesteps, context)
            result: torch.Tensor = unet._original_forward(x, timesteps, context)
            return result * strength

        unit = SimpleNamespace(control_model=SimpleNamespace(control_model=network))
        self.latest_network = SimpleNamespace(model=unet, lowvram=False, control_params=[unit])
        unet._original_forward = unet.forward
        unet.forward = MethodType(forward, unet)  # type: ignore[method-assign]


class A1111StandIn:
    """The fake host, and how a job of it runs."""

    def __init__(self, lora: FakeLora) -> None:
        self.lora = lora
        self.model = FakeModel(seed=0)
        self.controlnet = FakeControlNet()

    def checkpoint(self, model: FakeModel) -> None:
        """Another model in memory is the one that draws."""
        self.model = model
        sys.modules["modules.sd_models"].model_data.sd_model = model  # type: ignore[attr-defined]

    def load_weights(self, seed: int) -> None:
        """Another checkpoint's values in the same Parameters, as A1111 loads one."""
        self.model.load_state_dict(FakeModel(seed).state_dict())
        self.model.name_layers()
        for module in self.model.modules():
            vars(module).pop("network_current_names", None)
            vars(module).pop("network_weights_backup", None)

    def unet(
        self, height: int = 8, width: int = 8, batch: int = 2, tokens: int = 77
    ) -> torch.Tensor:
        """One step on noise that depends on the shape only."""
        noise = torch.Generator().manual_seed(1)
        x = torch.randn(batch, 4, height, width, generator=noise)
        context = torch.randn(batch, tokens, 24, generator=noise)
        with torch.no_grad():
            result: torch.Tensor = self.model.model.diffusion_model(
                x, torch.full((batch,), 321.5), context=context
            )
        return result

    def control(self, unet: nn.Module, strength: float, network: nn.Module | None = None) -> None:
        """Mikubill's ControlNet hooks the UNet, with a network beside it, as in its ``process``."""
        self.controlnet.hook(unet, strength, network)

    def restore(self, unet: nn.Module) -> None:
        """It lets the UNet go, as in ``postprocess``, or when the next job begins after an error;
        the method that it puts back stays among the attributes of the instance."""
        unet.forward = unet.__dict__.pop("_original_forward")
        self.controlnet.latest_network = None

    def decode(self, height: int = 8, width: int = 8) -> torch.Tensor:
        z = torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            result: torch.Tensor = self.model.first_stage_model.decoder(z)
        return result

    def attributes(self, *others: object) -> dict[str, Any]:
        """Everything that a patch could change, with identities; a LoRA's own marks left out."""
        found: dict[str, Any] = {}
        for name, module in self.model.named_modules():
            own = {k: id(v) for k, v in vars(module).items() if not k.startswith("network_")}
            found[name] = (
                type(module),
                own,
                list(module._forward_hooks),
                list(module._forward_pre_hooks),
                {k: id(v) for k, v in module._parameters.items()},
            )
        for index, other in enumerate(others):
            found[f"object {index}"] = dict(vars(other))
        for cls in LAYERS:
            found[cls.__name__] = cls.forward
        return found


class CondFunc:
    """A function that runs another one while a condition holds, like A1111's sd_hijack_utils."""

    def __init__(
        self, orig_func: Callable[..., Any], sub_func: Callable[..., Any], cond_func: Any
    ) -> None:
        self.__orig_func, self.__sub_func, self.__cond_func = orig_func, sub_func, cond_func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__cond_func(self.__orig_func, *args, **kwargs):
            return self.__sub_func(self.__orig_func, *args, **kwargs)
        return self.__orig_func(*args, **kwargs)


def conditional(method: Callable[..., Any], patcher: str, condition: Any) -> Callable[..., Any]:
    """The method that A1111's CondFunc installs; it casts while the condition holds."""

    def cast(own: Callable[..., Any], module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = own(module.float(), x.float()) * 3
        return result

    cast.__module__ = patcher
    patch = CondFunc(method, cast, condition)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return patch(*args, **kwargs)

    return ldm_stand_in.written_in(stand_in, "modules.sd_hijack_utils")


@contextmanager
def a1111() -> Iterator[A1111StandIn]:
    """The fake host in `sys.modules`."""
    lora = FakeLora()
    with ExitStack() as stack:
        stack.enter_context(ldm_stand_in.installed())
        host = A1111StandIn(lora)
        fakes = {
            "modules.shared": {
                "opts": SimpleNamespace(upcast_attn=False, lora_functional=False),
                "loaded_hypernetworks": [],
            },
            "modules.devices": {
                "fp8": False,
                "unet_needs_upcast": False,
                "dtype_unet": torch.float32,
                "dtype_vae": torch.float32,
                "device": torch.device("cpu"),
                "autocast": nullcontext,
            },
            "modules.scripts": {
                "scripts_txt2img": SimpleNamespace(alwayson_scripts=[object(), host.controlnet]),
                "scripts_img2img": None,
            },
            "modules.sd_models": {"model_data": SimpleNamespace(sd_model=host.model)},
            "modules.sd_unet": {"current_unet": None},
            "modules.sd_hijack": {"model_hijack": SimpleNamespace(circular_enabled=False)},
            "modules.call_queue": {"queue_lock": threading.Lock()},
        }
        names = ["modules", *fakes, "networks"]
        before = {name: sys.modules.get(name) for name in names}
        package = sys.modules["modules"] = ModuleType("modules")
        for name, values in fakes.items():
            module = sys.modules[name] = ModuleType(name)
            vars(module).update(values)
            setattr(package, name.rpartition(".")[2], module)
        sys.modules["networks"] = lora.module
        lora.patch_layers()
        try:
            yield host
        finally:
            lora.undo()
            for name, old in before.items():
                if old is None:
                    sys.modules.pop(name, None)
                else:
                    sys.modules[name] = old


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two outputs differ by rounding only."""
    return bool(torch.allclose(one, other, atol=1e-5, rtol=1e-4))
