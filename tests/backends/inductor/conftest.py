"""FlashAttention's stand-in."""

from tests.support.flash_attention_fixtures import (  # noqa: F401
    flash_library,
    install_flash,
    new_process,
)
