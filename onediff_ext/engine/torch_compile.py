"""Models and blocks over which a user has called `torch.compile`.

Dynamo traces a call and runs none of the Python code in it again. What stands in a method's place
shows it the method that was there before (`torch_versions.is_dynamo_tracing`). So these modules run
the user's own compilation of the host's code, and nothing of this package.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from onediff_ext.engine.validity.foreign_code import is_ours

TORCH_COMPILES = "torch.compile compiles it"


def is_wrapper(module: object) -> bool:
    """Whether a module is what ``torch.compile(model)`` returns.

    Args:
        module: Any object.
    """
    cls = type(module)
    return cls.__name__ == "OptimizedModule" and cls.__module__.startswith("torch._dynamo.")


def unwrapped(module: Any) -> Any:
    """Return the model of which ``torch.compile(model)`` has made a module; else the module.

    Args:
        module: Any object.
    """
    while is_wrapper(module):
        module = module._orig_mod
    return module


def is_compiled_function(function: object) -> bool:
    """Whether a callable is what ``torch.compile(function)`` returns.

    Args:
        function: Any object.
    """
    return hasattr(function, "_torchdynamo_orig_callable")


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module go through `torch.compile`, as far as the module itself shows it.

    Args:
        module: Compiled by ``module.compile()``, ``torch.compile(module)`` or
            ``module.forward = torch.compile(module.forward)``, or not.
    """
    if is_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forward = vars(module).get("forward")
    while forward is not None and is_ours(forward):
        forward = getattr(forward, "eager", None)
    return is_compiled_function(forward)


def compiled_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules of a model that `torch.compile` compiles, with all that are inside them.

    Args:
        model: A host's module.
    """
    found: set[nn.Module] = set()
    for module in model.modules():
        if module not in found and is_compiled(module):
            found.update(module.modules())
    return found
