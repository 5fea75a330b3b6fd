"""A graph exchange as a user names it: a folder, or a URL, with the rules of trust."""

from __future__ import annotations

from pathlib import Path

from onediff_ext.core.errors import OptionError, StoreError, UntrustedGraphError
from onediff_ext.store.folder_exchange import FolderExchange
from onediff_ext.store.fsspec_exchange import FsspecExchange
from onediff_ext.store.permissions import secure_folder


def open_exchange(address: str, *, trust: bool) -> FsspecExchange:
    """Open the exchange at a folder or URL.

    Args:
        address: A folder, made if it is missing, or a URL of `fsspec`.
        trust: The user trusts everybody who can write there.

    Returns:
        The exchange.

    Raises:
        OptionError: fsspec, or the package for this kind of URL, is missing.
        UntrustedGraphError: Others may write there, or nobody can tell, without `trust`.
        StoreError: The folder cannot be made.
    """
    exchange = FsspecExchange(address)
    if trust:
        return exchange
    if exchange.folder is None:
        raise UntrustedGraphError(
            f"Who may write to {address} cannot be seen from here, and graphs are native code.",
            "Add --trust if you trust everybody who may.",
        )
    folder = exchange.folder if "://" in address else Path(address)
    if not folder.is_absolute():
        raise OptionError(f"{address} is not a whole path.", "Name it from the root.")
    parts = (folder, folder / "graphs", folder / "leases", folder / "parts")
    try:
        for part in parts:
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(
            f"{folder} cannot be used ({exc.strerror or exc}).", "Name a folder that you may write."
        ) from exc
    for part in parts:
        secure_folder(part, holds_code=True)
    return FolderExchange(folder)
