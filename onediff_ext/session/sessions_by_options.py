"""The sessions of recent pictures, found by the options that the user chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from onediff_ext.core.options import CompileOptions
from onediff_ext.session.session import Session

_MAX_SESSIONS = 3


class SessionsByOptions:
    """Keeps the latest sessions open; their graphs serve the next picture with equal options.

    Args:
        new_session: Opens a session.

    Attributes:
        latest: The session that was asked for last; None before the first.
        are_paused: Whether the user has paused the builds of all sessions.
    """

    def __init__(self, new_session: Callable[[CompileOptions], Session]) -> None:
        self._new_session = new_session
        self._sessions: dict[CompileOptions, Session] = {}
        self.latest: Session | None = None
        self.are_paused = False

    def session_for(self, options: CompileOptions) -> Session:
        """Return the session for these options; the oldest one is closed above the limit.

        Args:
            options: The user's options. Options that differ only in `build` share a session.
        """
        # Options that differ only in `build` share one session and its loaded graphs.
        key = replace(options, build="never")
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = self._new_session(options)
            if self.are_paused:
                session.pause_builds()
            for old in list(self._sessions)[:-_MAX_SESSIONS]:
                self._sessions.pop(old).close()
        session.options = options
        self.latest = session
        return session

    def add(self, options: CompileOptions, session: Session) -> None:
        """Have a session ready for a picture that is likely to come with these options.

        Args:
            options: As for `session_for`.
            session: A new one.
        """
        self._sessions[replace(options, build="never")] = session
        self.latest = session

    def remove(self, session: Session) -> None:
        """Close a session that no picture has used.

        Args:
            session: From `add`.
        """
        self._sessions = {key: each for key, each in self._sessions.items() if each is not session}
        session.close()
        if self.latest is session:
            self.latest = None

    def open(self, options: CompileOptions) -> Session:
        """Return a new session, which is not kept here.

        Args:
            options: As for `session_for`.
        """
        return self._new_session(options)

    def pause_builds(self) -> None:
        """End the builds of all sessions, and start none until `go_on_with_builds`."""
        self.are_paused = True
        for session in list(self._sessions.values()):
            session.pause_builds()

    def go_on_with_builds(self) -> None:
        """End the pause; the latest session builds what it misses, others when they draw again."""
        self.are_paused = False
        for session in list(self._sessions.values()):
            session.background.end_pause()
        if self.latest is not None:
            self.latest.go_on_with_builds()

    def cancel_builds(self) -> None:
        """End the builds of all sessions, and a pause; a picture has its missing graphs built."""
        self.are_paused = False
        for session in list(self._sessions.values()):
            session.cancel_builds()
            session.background.end_pause()

    def make_room(self, needed_bytes: int, device: torch.device) -> None:
        """As `SessionMemory.make_room`, of all sessions.

        Args:
            needed_bytes: What the host needs.
            device: Where.
        """
        for session in list(self._sessions.values()):
            session.memory.make_room(needed_bytes, device)

    def returnable_bytes(self) -> int:
        """Return the sum of `SessionMemory.returnable_bytes` of all sessions."""
        return sum(session.memory.returnable_bytes() for session in list(self._sessions.values()))

    def close(self) -> None:
        """Close all sessions."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
