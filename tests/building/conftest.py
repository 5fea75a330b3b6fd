"""Sessions with a store of their own, on a small UNet."""

from tests.support.session_fixtures import (  # noqa: F401
    exports,
    instant_workers,
    open_session,
    small,
    workers_at_full_priority,
)
