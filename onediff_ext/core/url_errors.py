"""Errors of fsspec when a URL is opened, in the user's words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onediff_ext.core.errors import OptionError


@contextlib.contextmanager
def opening(url: str) -> Iterator[None]:
    """Turn fsspec's errors within the ``with`` block into those of a wrong option.

    Args:
        url: What is opened.

    Raises:
        OptionError: The package for this kind of URL is not installed, or its protocol is unknown.
    """
    try:
        yield
    except ImportError as exc:
        raise OptionError(f"{url} cannot be opened ({exc}).", "Install what it names.") from exc
    except ValueError as exc:
        hint = "Name a folder, or a URL such as s3://bucket/folder."
        raise OptionError(f"{url} cannot be opened ({exc}).", hint) from exc
