"""A status for each of the five things that the header can say, and texts that are too long."""

from __future__ import annotations

from dataclasses import replace

from onediff_ext.core.headline import Headline
from onediff_ext.core.status import Status

_HOOK = "attn1 has a hook or a replaced forward of another extension"
STATES = {
    Headline.OFF: Status(),
    Headline.WITHOUT: Status(
        "eager",
        kinds_needed=16,
        reasons=(f"BasicTransformerBlock: {_HOOK}",),
        eager_blocks=((_HOOK, 70),),
        changed_by=((_HOOK, "sd-webui-negpip"),),
        blocks_needed=70,
        picture_s=4.1,
    ),
    Headline.BUILDING: Status(
        "compiled in part",
        kinds_ready=7,
        kinds_needed=16,
        building=True,
        seconds_left=40.0,
        first_builds_s=185.0,
        blocks_compiled=30,
        blocks_needed=70,
        picture_s=4.1,
    ),
    Headline.GRAPHS: Status(
        "compiled",
        kinds_ready=16,
        kinds_needed=16,
        blocks_compiled=70,
        blocks_needed=70,
        speedup=2.31,
        size_is_measured=True,
        picture_s=1.8,
        without_s=4.13,
    ),
    Headline.PART: Status(
        "compiled in part",
        kinds_ready=16,
        kinds_needed=16,
        reasons=(f"BasicTransformerBlock: {_HOOK}",),
        eager_blocks=((_HOOK, 16),),
        changed_by=((_HOOK, "sd-webui-negpip"),),
        blocks_compiled=12,
        blocks_needed=28,
        picture_s=2.9,
        without_s=4.1,
    ),
}
"""What the header says → a status that makes it say so."""

TEXTS = {
    Headline.OFF: "off",
    Headline.WITHOUT: "without graphs: sd-webui-negpip changed the model",
    Headline.BUILDING: "building 7 of 16 graphs, about 40 s left",
    Headline.GRAPHS: "graphs, 2.3x",
    Headline.PART: "graphs in part, 12 of 28 blocks (sd-webui-negpip changed the model)",
}

LONG = replace(
    STATES[Headline.PART],
    changed_by=((_HOOK, "an-extension-with-a-name-that-does-not-end-" * 4),),
    reasons=(f"BasicTransformerBlock: {_HOOK}", *(f"{'x' * 300} {n}" for n in range(4))),
    problem=f"The disk is full: {'/a/very/long/path' * 20}",
)
