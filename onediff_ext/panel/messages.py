"""Messages with values that reach the panel in English: errors, notes, results.

They come from parts that know no language. `Phrases.translated` finds a message's template here and
fills its translation with the same values. `tests/panel/test_messages.py` compares these templates
with the source.
"""

from __future__ import annotations

import functools
import re

from onediff_ext.panel.engine_messages import ENGINE_MESSAGES

EXAMPLE_SIZES = (
    'Write sizes as WIDTHxHEIGHT or WIDTHxHEIGHT@BATCH, for example "512x768, 1024x1024@2".'
)

# What cannot be used, and what to do.
_ERRORS = (
    "The list of sizes has {n} characters; {most} are allowed.",
    "The list has {n} sizes; {most} are allowed.",
    "Warm up a part of them at a time.",
    '"{entry}" is not a size.',
    EXAMPLE_SIZES,
    '"{entry}" asks for {n} images at once.',
    "Use 1 to {most} after the @.",
    '"{entry}" cannot be generated: each side must be a multiple of {step} from {least} to {most}.',
    "The nearest size is {nearest}.",
    '"{choice}" is no number of GPUs.',
    'Use 1, 2, … or "all".',
    "This machine has {count} GPUs, not {choice}.",
    'Use "all".',
    "{value} is no DeepCache setting.",
    "{value} is no DeepCache {name}.",
    'Use {levels}, an interval such as 3, or a text such as "3 depth=1".',
    "A DeepCache interval of {n} cannot be used.",
    "Choose 1 (off) to 50, or {levels}.",
    "A DeepCache depth of {n} cannot be used.",
    "Choose 0 or more.",
    "{what}: {value} is unknown.",
    "Unknown {what} {name}.",
    'Did you mean "{name}"? Use one of: {names}.',
    "Use one of: {names}.",
    'Did you mean "{name}"? Known: {names}.',
    "Known: {names}.",
    "{what}: a text of {n} characters is too long.",
    "Use {most} at most.",
    "{what}: the value is nested.",
    "Use a text or a number.",
    "{what} is unavailable in this WebUI.",
    "Use the preset Balanced.",
    "{value} is not a size box.",
    'Write "256x256 - 2048x2048".',
    'The size box "{value}" is empty.',
    "Write the smaller size first.",
    "{value} is not a batch range.",
    'Write "1 - 4".',
    'The batch range "{value}" is empty.',
    "Write the smaller number first.",
    "Nothing was warmed up: {why}.",
    "Graphs could not be used: {why}.",
    '"If graphs cannot be used", under Advanced in the panel, says to stop then.',
    "The {name} is missing.",
    "Write a number.",
    "The seed {seed} is too large.",
    "Use 0 to {most}, or -1.",
    "Interrupted.",
)
# What was done.
_RESULTS = (
    "{name} is ready.",
    "{name} is loaded.",
    "{n} were done already.",
    "1 picture in {time} s, {step} s a step. Seed {seed}.",
    "{n} pictures in {time} s, {step} s a step. Seed {seed}.",
    "{done} of {needed}: {size}, {step} s a step",
    "{done} of {needed}:",
    "DeepCache: {n} of {needed} UNet calls shallow",
    "DeepCache: {n} of {needed} UNet calls shallow, {rest} without it",
    "Left out: {what}",
    "{what} ignored: {why}",
    "The {what} has {n} tokens; what comes after {most} is ignored.",
)
MESSAGES = (*_ERRORS, *_RESULTS, *ENGINE_MESSAGES)


@functools.cache
def patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Each template with values, and the pattern of its messages."""
    found = []
    for template in MESSAGES:
        pieces = re.split(r"\{(\w+)\}", template)
        if len(pieces) == 1:
            continue
        for index in range(0, len(pieces), 2):
            pieces[index] = re.escape(pieces[index])
        for index in range(1, len(pieces), 2):
            pieces[index] = f"(?P<{pieces[index]}>.+?)"
        found.append((template, re.compile("".join(pieces), re.DOTALL)))
    # The one with the most words of its own counts: others may fit it too.
    found.sort(key=lambda pair: -len(re.sub(r"\{\w+\}", "", pair[0])))
    return tuple(found)
