"""`compile_module`: compiled graphs for a single model, such as ``pipe.unet``."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from onediff_ext.core.components import ComponentId, Role
from onediff_ext.core.errors import OptionError
from onediff_ext.core.options import CompileOptions
from onediff_ext.core.words import typed
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.torch_compile import unwrapped
from onediff_ext.hosts.diffusers.compile import (
    COMPILED_ATTRIBUTE,
    chosen_options,
    new_session,
    undo_compile,
)
from onediff_ext.hosts.diffusers.deepcache import lifted_from
from onediff_ext.session.cfg_parallel import CfgParallel
from onediff_ext.session.model_component import Component, known_blocks
from onediff_ext.session.session import Session

logger = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)

_ROLES = {"Encoder": Role.VAE_ENCODER, "Decoder": Role.VAE_DECODER}
# Sessions of modules that were compiled without one, by their options, and the modules.
_sessions: weakref.WeakValueDictionary[CompileOptions, Session] = weakref.WeakValueDictionary()
_users: weakref.WeakKeyDictionary[Session, weakref.WeakSet[CompiledModule]] = (
    weakref.WeakKeyDictionary()
)


class CompiledModule:
    """The state of one compiled module.

    Args:
        module: A UNet, a transformer, a ControlNet, a VAE, or one half of a VAE.
        session: Has the kinds, graphs and counts.

    Attributes:
        session: As passed in.
        components: The models that run compiled.
    """

    def __init__(self, module: nn.Module, session: Session) -> None:
        self.session, self._module = session, module
        self.components = [
            Component(identity, model, session, channels_last=True)
            for identity, model in _parts(module)
            if known_blocks(model, session.families)
        ]
        self._patches = Patches()

    def install(self) -> None:
        """Make the components run through graphs."""
        self._patches.set(self._module, COMPILED_ATTRIBUTE, self)
        with lifted_from(self._module):
            for component in self.components:
                component.install()
                wanted = self.session.options.cfg_parallel
                if component.role.is_denoiser and wanted != "off":
                    component.cfg_parallel = CfgParallel(component, wanted)

    def remove(self) -> None:
        """Restore modules and weights; stop builds if nothing else needs them."""
        with lifted_from(self._module):
            for component in self.components:
                component.remove()
        self._patches.undo()
        users = _users.get(self.session)
        if users is not None:
            users.discard(self)
            if not users:
                _sessions.pop(self.session.options, None)
                self.session.close()


def compile_module(
    module: Module,
    *,
    options: CompileOptions | Mapping[str, Any] | None = None,
    backend: str | None = None,
    session: Session | None = None,
    use_graph: bool = True,
    dynamic: bool = True,  # noqa: ARG001
) -> Module:
    """Run one model through compiled graphs, at any size.

    The form of OneDiff's own examples: ``pipe.unet = compile_module(pipe.unet)`` and
    ``pipe.vae.decoder = compile_module(pipe.vae.decoder)``. The model is changed in place and keeps
    its class, so the assignment may be left out. `undo_compile` restores it.

    Missing graphs are built in the background, as by `compile_pipe`. Modules that are compiled with
    equal options share a session.

    Args:
        module: A UNet, a ControlNet, a VAE, or its ``encoder`` or ``decoder``. Another model, such
            as a text encoder, stays eager; a warning says so.
        options: `CompileOptions`, or a mapping of its fields.
        backend: Shorthand for the option of this name.
        session: Share the graphs of this session; the caller closes it.
        use_graph: False leaves the model eager, as in OneDiff.
        dynamic: Accepted as in OneDiff. Every graph is for any size.

    Returns:
        The same module.

    Raises:
        OptionError: An option is unknown, differs from the session's or is for pipelines only
            (`step_cache`), or it is no module. The module stays as it was.
    """
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"{typed(module)} is no module.",
            "Pass a model such as pipe.unet, or call compile_pipe(pipe).",
        )
    chosen = chosen_options(options, backend, session)
    shared = session is None
    if use_graph and shared:
        _check_for_modules(chosen)
        session = _shared_session(chosen)  # raises before anything is changed
    undo_compile(module)
    if not use_graph:
        return module
    if session is None or shared:  # the last of its modules may have closed it
        session = _shared_session(chosen)
    compiled = CompiledModule(unwrapped(module), session)
    if not compiled.components:
        logger.warning("%s stays eager: it has no known blocks", type(module).__name__)
        return module
    if shared:
        _users.setdefault(session, weakref.WeakSet()).add(compiled)
    compiled.install()
    return module


# OneDiff's name.
oneflow_compile = compile_module


def _check_for_modules(options: CompileOptions) -> None:
    """Raise OptionError for a step cache, whose calls a pipeline names."""
    if options.step_cache != "off":
        raise OptionError(
            "A step cache is for pipelines.", "Call compile_pipe(pipe) with this option."
        )


def _shared_session(options: CompileOptions) -> Session:
    session = _sessions.get(options)
    if session is None:
        session = _sessions[options] = new_session(options)
    return session


def _parts(module: nn.Module) -> list[tuple[ComponentId, nn.Module]]:
    """Return the models that a module consists of, each with its role."""
    name = type(module).__name__
    nets = getattr(module, "nets", None)
    if name == "MultiControlNetModel" and isinstance(nets, nn.ModuleList):
        return [(ComponentId(Role.CONTROLNET, index), net) for index, net in enumerate(nets)]
    halves = [
        (ComponentId(role), model)
        for role, model in (
            (Role.VAE_ENCODER, getattr(module, "encoder", None)),
            (Role.VAE_DECODER, getattr(module, "decoder", None)),
        )
        if name.startswith("Autoencoder") and isinstance(model, nn.Module)
    ]
    return halves or [(ComponentId(_role_of(name)), module)]


def _role_of(name: str) -> Role:
    """The role of a model by the name of its class."""
    if name.endswith("ControlNetModel"):
        return Role.CONTROLNET
    return _ROLES.get(name, Role.TRANSFORMER if "Transformer" in name else Role.UNET)
