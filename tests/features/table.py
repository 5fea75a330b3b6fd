"""`docs/features.md`: the table of all features, as text and back."""

from __future__ import annotations

from collections.abc import Mapping

from tests.features.feature import FEATURES, Feature
from tests.features.trial import Outcome

_HEAD = """\
# Features of diffusers

How OneDiff runs each feature of diffusers' pipelines. Pictures equal eager's with every one
of them. This page is made from tests: `python -m tests.features` draws with each feature on a CPU,
compares the picture with eager's, and writes what ran. `tests/features` fails when a row is out of
date.

- **Graphs:** the blocks of the picture that ran through compiled graphs, of all its blocks. VAE and
  ControlNet count.
- **CUDA graph:** whether the whole forward of the UNet or transformer is replayed. The tests'
  recorder stands for CUDA graphs on a CPU.
"""


def row(feature: Feature, outcome: Outcome) -> str:
    """Return the feature's line of the table."""
    blocks = f"{outcome.blocks} of {outcome.of_blocks}"
    graphs = f"all {blocks}" if outcome.blocks == outcome.of_blocks else blocks
    captured = "yes" if outcome.is_captured else "no"
    return f"| {feature.name} | {graphs} | {captured} | {outcome.reason} |"


def page(outcomes: Mapping[str, Outcome]) -> str:
    """Return the whole page.

    Args:
        outcomes: Of each feature, by its name.
    """
    lines, group = [_HEAD], ""
    for feature in FEATURES:
        if feature.group != group:
            group = feature.group
            lines.append(f"\n## {group}\n| feature | graphs | CUDA graph | reason |")
            lines.append("| --- | --- | --- | --- |")
        lines.append(row(feature, outcomes[feature.name]))
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"
