"""What stands in place of a host's method, under hooks and wrappers of others."""

from __future__ import annotations

from types import CodeType
from typing import Any


class StandIn:
    """Base of callables that stand in place of a method of a host's object.

    `functools.wraps` gives a wrapper all attributes of what it wraps. Hooks of accelerate and
    diffusers' step caches are such wrappers: a copy of the model would copy the session, which
    cannot be copied, and a wrapper that outlives a compilation would keep all of it alive. So
    wrappers find no attributes.

    While Dynamo traces a call of it (`torch_versions.is_dynamo_tracing`), it only calls the method
    that it replaced: a user's own `torch.compile` compiles the host's code.
    """

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """No attributes, for `vars` and `functools.wraps`; each by its name is there."""
        return {}

    @property
    def __code__(self) -> CodeType:
        """Its own code, of which `torch.export` reads file and line where it runs Python itself."""
        code: CodeType = type(self).__call__.__code__
        return code
