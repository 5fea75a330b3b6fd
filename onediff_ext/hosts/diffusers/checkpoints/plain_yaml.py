"""YAML as a checkpoint's settings are written: values, lists and mappings, few levels deep.

Aliases are refused. A file of 500 bytes that repeats lists of itself is gigabytes when it is
printed, and minutes of work when its mappings are merged.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH = 50
"""The original code's files have eight levels."""


def load_plain(text: str) -> Any:
    """Return what a YAML text says.

    Raises:
        yaml.YAMLError: It is no YAML, has aliases, or more than `MAX_DEPTH` levels.
        ValueError: A value cannot be what its form says, such as a date of day 99.
    """
    return yaml.load(text, Loader=_PlainLoader)


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader for files from elsewhere."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(None, None, "aliases are not read", event.start_mark)
        # Looked at first: the time that the scanner takes for a bracket grows with the open ones.
        if self._depth >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, "it is nested too deeply", event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1
