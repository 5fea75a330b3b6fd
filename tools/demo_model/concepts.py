"""The concepts that the model learns: concepts.tsv, one picture with its names on each line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Concept:
    """One picture of the training set.

    Attributes:
        codepoint: Its Unicode code points in hexadecimal, such as "1F436".
        names: Its names in captions; the first is the main name.
    """

    codepoint: str
    names: tuple[str, ...]


def read_concepts() -> list[Concept]:
    """Read the table of concepts, in its own order."""
    path = Path(__file__).with_name("concepts.tsv")
    concepts = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        codepoint, name, aliases = line.split("\t")
        others = aliases.split("|") if aliases else []
        concepts.append(Concept(codepoint, (name, *others)))
    return concepts
