"""Sessions with a store of their own, on a small UNet."""

from tests.support.session_fixtures import (  # noqa: F401
    _do_not_give_way,
    instant,
    open_session,
    small,
)
