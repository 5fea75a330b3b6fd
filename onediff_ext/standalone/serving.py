"""The address of the stand-alone page, and its users and passwords."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onediff_ext.core.errors import OptionError, UnsafeFileError
from onediff_ext.core.untrusted_files import read_regular
from onediff_ext.panel.foreign_requests import is_loopback, machine_names

_MAX_AUTH_BYTES = 64 * 1024
_READ_LIMIT_S = 10.0
_FORM_HINT = "Write USER:PASSWORD."


@dataclass(frozen=True)
class Serving:
    """How the page is served.

    Args:
        host, port: Address; None stands for the first free port from 7860.
        open_browser: Open the page in the user's browser.
        auth: (user, password) of each user; empty if everybody may use the page.
        names: Names of this server besides ``localhost`` and addresses in numbers.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    open_browser: bool = True
    auth: tuple[tuple[str, str], ...] = ()
    names: frozenset[str] = frozenset()

    @property
    def is_local(self) -> bool:
        """Whether only this machine's own users reach the page.

        A further name means a proxy, which others reach.
        """
        return is_loopback(self.host) and not self.names


def parse_serving(
    *,
    host: str,
    port: int | None,
    open_browser: bool,
    auth: Sequence[str] = (),
    auth_file: Path | None = None,
    no_auth: bool = False,
    allowed_hosts: Sequence[str] = (),
) -> Serving:
    """Check the options of the command line.

    Args:
        host, port, open_browser: As in `Serving`.
        auth: ``USER:PASSWORD`` each.
        auth_file: The same, one a line.
        no_auth: Serve the page without a password to everybody who reaches the address.
        allowed_hosts: Further names of this server, such as a proxy's.

    Raises:
        OptionError: A value cannot be used, or others reach the page and neither a password nor
            `no_auth` is given.
    """
    if port is not None and not 1 <= port <= 65535:
        raise OptionError(f"{port} is no port.", "Use 1 to 65535, or leave --port out.")
    users = [_parse_user(text) for text in auth]
    if auth_file is not None:
        users += _read_users(auth_file)
    if users and no_auth:
        raise OptionError("--auth and --no-auth exclude each other.", "Leave one of them out.")
    names = frozenset(name.strip().lower() for name in allowed_hosts if name.strip())
    serving = Serving(host, port, open_browser, tuple(users), names)
    if not serving.is_local and not users and not no_auth:
        raise OptionError(
            f"Others can reach a page at {', '.join([host, *sorted(names)])}, and it has no"
            " password.",
            "Add --auth-file FILE (lines of USER:PASSWORD) or --auth USER:PASSWORD; --no-auth"
            " serves it to everybody.",
        )
    if not is_loopback(host):
        names |= machine_names() | {host.strip().lower()}
    return Serving(host, port, open_browser, tuple(users), names)


def _parse_user(text: str) -> tuple[str, str]:
    user, _, password = text.partition(":")
    if not user.strip() or not password:
        # The message leaves the text out: it may be a password.
        raise OptionError("A user and a password are needed for --auth.", _FORM_HINT)
    return user.strip(), password


def _read_users(path: Path) -> list[tuple[str, str]]:
    try:
        content = read_regular(path, limit_bytes=_MAX_AUTH_BYTES, limit_s=_READ_LIMIT_S)
        lines = content.decode("utf-8-sig").splitlines()
    except UnsafeFileError as exc:
        raise OptionError(exc.message, _FORM_HINT) from exc
    except OSError as exc:
        raise OptionError(
            f"{path} cannot be read ({exc.strerror or exc}).", "Check the file's name and rights."
        ) from exc
    except ValueError as exc:
        raise OptionError(f"{path} cannot be read.", "Save it as UTF-8 text.") from exc
    users = [_parse_user(line) for line in lines if line.strip()]
    if not users:
        raise OptionError(f"{path} names no user.", f"{_FORM_HINT} One a line.")
    return users
