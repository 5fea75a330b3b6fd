"""Errors of fsspec when a URL is opened, in the user's words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onediff_ext.core.errors import OneDiffError, OptionError


@contextlib.contextmanager
def opening(url: str) -> Iterator[None]:
    """Turn all errors of fsspec in the ``with`` block into those of a wrong option.

    Args:
        url: What is opened.

    Raises:
        OptionError: The package for this kind of URL is not installed, its protocol is unknown, or
            it cannot be reached.
    """
    try:
        yield
    except ImportError as exc:
        raise OptionError(f"{url} cannot be opened ({exc}).", "Install what it names.") from exc
    except ValueError as exc:
        hint = "Name a folder, or a URL such as s3://bucket/folder."
        raise OptionError(f"{url} cannot be opened ({exc}).", hint) from exc
    except OneDiffError:
        raise
    except Exception as exc:  # each package has classes of its own, and some ask their server now
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        hint = "Check its name, and that you may read it."
        raise OptionError(f"{url} cannot be opened ({reason}).", hint) from exc
