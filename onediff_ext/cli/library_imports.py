"""The imports of diffusers, torch and transformers, which take seconds."""

from __future__ import annotations

from onediff_ext.core.garbage_collection import without_collection


@without_collection()
def import_torch() -> None:
    """Import torch, and what threads must not import at the same time as the other libraries."""
    import torch
    import torch._dynamo  # noqa: F401


@without_collection()
def import_libraries() -> None:
    """Import the libraries before the clock of the start-up time runs."""
    import diffusers
    import torch  # noqa: F401
    import transformers

    # Their log messages do not concern the user, and nothing is downloaded.
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
