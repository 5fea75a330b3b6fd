"""The arguments of the script "OneDiff: img2img batch across resolutions"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onediff_ext.core.errors import OptionError
from onediff_ext.core.json_schema import check_names
from onediff_ext.panel.field import CHECKBOX, COMBO, NUMBER, TEXT, Field
from onediff_ext.panel.field_values import checked
from onediff_ext.panel.gpu_choices import ALL, ONE
from onediff_ext.pictures.batch.batch_job import MAX_BATCH_SIZE
from onediff_ext.pictures.naming import DEFAULT_TEMPLATE
from onediff_ext.pictures.size_rules import SUGGESTED_RULES

FIELDS = (
    Field(
        "input",
        TEXT,
        "Input folder",
        "Pictures of any sizes and formats; nothing has to be a multiple of 8.",
        "",
    ),
    Field(
        "output",
        TEXT,
        "Output folder",
        "With a fixed seed, a run that was stopped goes on where it stopped.",
        "",
    ),
    Field(
        "size",
        COMBO,
        "Size of results",
        "own, scale:0.5, longest:768 or fixed:512x768; other values may be typed in",
        SUGGESTED_RULES[0],
        SUGGESTED_RULES,
        format="size-rule",
    ),
    Field(
        "batch",
        NUMBER,
        "Pictures of one size at once",
        "As many as the memory allows.",
        4,
        span=(1, MAX_BATCH_SIZE),
    ),
    Field("recursive", CHECKBOX, "Subfolders too", "Search subfolders of the input folder.", False),
    Field(
        "captions",
        CHECKBOX,
        "cat.txt beside cat.jpg is its prompt",
        "A text file with a picture's name replaces the prompt.",
        False,
    ),
    Field(
        "vary_seed",
        CHECKBOX,
        "Another seed for each picture",
        "Add the picture's number to the seed.",
        False,
    ),
    Field(
        "keep_alpha",
        CHECKBOX,
        "Keep transparency",
        "Give each result the transparency of its input.",
        False,
    ),
    Field(
        "name",
        TEXT,
        "Names of results",
        "{stem}, {index}, {seed}, {width}, {height}, {date}",
        DEFAULT_TEMPLATE,
        format="name-template",
    ),
    Field(
        "gpus",
        COMBO,
        "GPUs",
        "Each further GPU draws with a WebUI process of its own, which starts with the run.",
        ONE,
        (ONE, ALL),
        format="gpus",
    ),
)
"""The order of the script's positional arguments."""
BY_NAME = {field.name: field for field in FIELDS}


def read_arguments(arguments: Sequence[Any]) -> dict[str, Any]:
    """Read the script's arguments: positional ones, or one object as the first.

    Returns:
        A value for each of `FIELDS`. Missing ones, None and empty texts are the defaults.

    Raises:
        OptionError: A name is unknown, or a value cannot be used.
    """
    if arguments and isinstance(arguments[0], Mapping):
        given = dict(arguments[0])
        check_names(given, BY_NAME, "argument")
    elif len(arguments) > len(FIELDS):
        raise OptionError(
            f"The batch script has {len(FIELDS)} arguments; {len(arguments)} are given.",
            f"In this order: {', '.join(BY_NAME)}.",
        )
    else:
        given = dict(zip(BY_NAME, arguments, strict=False))
    return {
        field.name: field.default
        if given.get(field.name) in (None, "")
        else checked(field, given[field.name])
        for field in FIELDS
    }
