"""The sessions of recent jobs, found by the options that the user chose."""

from __future__ import annotations

from dataclasses import replace

from onediff_ext.core.options import CompileOptions
from onediff_ext.hosts.base import WebUIHost
from onediff_ext.session.session import Session

_MAX_SESSIONS = 3


class SessionsByOptions:
    """Keeps the latest sessions open; their loaded graphs serve the next job with equal options.

    Args:
        host: The adapter of the running WebUI.

    Attributes:
        latest: The session of the latest job; None before the first.
    """

    def __init__(self, host: WebUIHost) -> None:
        self._host = host
        self._sessions: dict[CompileOptions, Session] = {}
        self.latest: Session | None = None

    def session_for(self, options: CompileOptions) -> Session:
        """The session for these options; the oldest one is closed above the limit."""
        # Options that differ only in `build` share one session and its loaded graphs.
        key = replace(options, build="never")
        session = self._sessions.get(key)
        if session is None:
            session = Session(options, self._host.families(), self._host.rules())
            self._sessions[key] = session
            for old in list(self._sessions)[:-_MAX_SESSIONS]:
                self._sessions.pop(old).close()
        session.options = options
        self.latest = session
        return session

    def close(self) -> None:
        """Close all sessions."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
