"""Eager reasons in words for people: who did it, what it means, what to do.

The engine's reasons name classes and modules. They stay available, one click deeper.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onediff_ext.core.extension_names import extension_of_module, module_in_reason
from onediff_ext.panel import phrases
from onediff_ext.panel.phrases import Phrases

_WORDS = 6


@dataclass(frozen=True)
class Rule:
    """How to put the reasons of one kind.

    Args:
        pattern: Found in the engine's reason.
        why: At most six words, such as ``"a hypernetwork is on"``.
        advice: What the user can do, in one sentence.
    """

    pattern: re.Pattern[str]
    why: str
    advice: str


@dataclass(frozen=True)
class PlainReason:
    """One reason for people.

    Args:
        why: At most six words, besides the name of an extension.
        advice: What to do, in one sentence.
        technical: The engine's own text.
    """

    why: str
    advice: str
    technical: str


def _rule(pattern: str, why: str, advice: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), why, advice)


# The first one that fits counts. An extension that is known by name comes before all of them.
RULES = (
    _rule(
        r"token ?merging|\btome|tomesd",
        "token merging is on",
        "Set its ratio to 0 in Settings → Optimizations, or turn off the extension that"
        " merges tokens.",
    ),
    _rule(
        r"another process has been building",
        "another program builds the same graphs",
        "Nothing to do: graphs come while you draw.",
    ),
    _rule(
        r"builds are paused",
        "builds are paused",
        "Press Go on to have the rest built.",
    ),
    _rule(
        r"builds were cancelled",
        "builds were cancelled",
        "The next picture has its missing graphs built.",
    ),
    _rule(
        r"none may be built",
        "graphs are built on request only",
        "Press Build now, or change Build missing graphs in Settings → OneDiff.",
    ),
    _rule(
        r"there is no graph yet|never loaded on this machine",
        phrases.NOT_BUILT_YET,
        "Nothing to do: graphs come while you draw.",
    ),
    _rule(
        r"size box|batch range",
        "outside your own size limits",
        "Change Size box or Batch range under Advanced.",
    ),
    _rule(
        r"offloading",
        "weights move to save memory",
        "Free GPU memory, or choose a smaller checkpoint.",
    ),
    _rule(r"hypernetwork", "a hypernetwork is on", "Take the hypernetwork out for more speed."),
    _rule(
        r"use old method",
        "LoRAs are applied at each step",
        "Turn off Lora/Networks: use old method in Settings → Compatibility.",
    ),
    _rule(
        r"applied at each call",
        "LoRAs are applied at each step",
        "Set Diffusion in Low Bits to Automatic, at the top of the page.",
    ),
    _rule(
        r"\bLoRA\b",
        "a LoRA has its own layers",
        "Leave that LoRA out for more speed.",
    ),
    _rule(
        r"stored as|fp8 weight",
        "weights are stored in another format",
        "Choose a checkpoint in fp16, or turn FP8 weight off in Settings → Optimizations.",
    ),
    _rule(
        r"upcast|cast by hand",
        "layers cast weights by hand",
        "Start the WebUI without --upcast-sampling if your GPU allows.",
    ),
    _rule(
        r"^torch \d|graphs need \d",
        "this torch builds no graphs",
        "Install a newer torch, as the technical details say.",
    ),
    _rule(
        r"triton|compiler|pip install",
        "a program for builds is missing",
        "Install it with the command in the technical details.",
    ),
    _rule(
        r"the UNet of .* is active|models of class|not supported",
        "this model has no graphs",
        "Choose a Stable Diffusion checkpoint with its own UNet.",
    ),
    _rule(
        r"memory",
        "memory was short",
        "Draw smaller pictures, or fewer at once.",
    ),
    _rule(
        r"differ|NaN|\bin use\b|could not be compared|something changes it here",
        "a graph failed its check",
        "The picture is right. Please copy the report, under Technical details, into an issue.",
    ),
    _rule(
        r"could not be built|failed while running|^failed|cannot be looked at",
        "something went wrong in OneDiff",
        "The picture is right. Please copy the report, under Technical details, into an issue.",
    ),
    _rule(
        r"IP-?Adapter",
        "IP-Adapter is on",
        "Nothing to do: these blocks have no graphs yet.",
    ),
    _rule(
        r"attention (by|of class|processor)|attention is replaced",
        "this attention has no graphs",
        "Choose a cross attention optimization named sdp in Settings → Optimizations.",
    ),
    _rule(
        r"step cache",
        "a step cache is on",
        "Nothing to do: it decides at each step, and its blocks run through graphs.",
    ),
    _rule(
        r"another extension",
        "another extension changed the model",
        "Turn extensions off one by one to find it.",
    ),
)
OTHER = Rule(re.compile(""), "see Technical details", "Copy the report if you need help.")


def explain(
    reason: str,
    words: Phrases,
    changed_by: Mapping[str, str] | None = None,
    file_of: Callable[[str], str | None] = lambda _: None,
) -> PlainReason:
    """Put one eager reason in plain words.

    Args:
        reason: The engine's text.
        words: The language.
        changed_by: Reason → extension, for reasons that do not name a module themselves.
        file_of: Finds the file of a module that Python does not list.
    """
    extension = next((name for text, name in (changed_by or {}).items() if text in reason), None)
    module = module_in_reason(reason)
    if extension is None and module is not None:
        extension = extension_of_module(module, file_of)
    rule = next((rule for rule in RULES if rule.pattern.search(reason)), OTHER)
    if extension is not None and rule is not RULES[0]:
        return PlainReason(
            words.say(phrases.CHANGED_BY, extension=extension),
            words.say(phrases.TURN_OFF, extension=extension),
            reason,
        )
    return PlainReason(words.say(rule.why), words.say(rule.advice), reason)


def is_about_memory(reason: PlainReason) -> bool:
    """Whether graphs are not used because GPU memory is short, or is being saved."""
    return re.search(r"memory|offloading", reason.technical, re.IGNORECASE) is not None


def fixed_texts() -> list[str]:
    """Every `why` and `advice` of the rules, for their translation."""
    return [text for rule in (*RULES, OTHER) for text in (rule.why, rule.advice)]
