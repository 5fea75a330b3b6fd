"""An option that would do nothing is refused, with the reason and the next step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest

from onediff_ext.cli.main import make_parser
from onediff_ext.cli.unused_options import HERE, WITH, WITHOUT, name_of, unused_here
from tests.support.command_line import run_here

NEEDED = {
    "img2img": ["in"],
    "warmup": ["64x64"],
    "graphs export": ["file"],
    "graphs import": ["file"],
}
"""What a command needs beside options."""
VALUES = {"--guidance-steps": "off"}
"""Of options that take no number."""


def parsers_in(parser: Any, command: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, and its parser."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield command, parser
    for name, below in nested[0].choices.items() if nested else ():
        yield from parsers_in(below, f"{command} {name}".strip())


ACTIONS = {
    command: {name_of(action): action for action in parser._actions}
    for command, parser in parsers_in(make_parser())
}
REQUIRED = {command: [a for a in of.values() if a.nargs == "+"] for command, of in ACTIONS.items()}
USED = {command: actions.keys() - unused_here(command) for command, actions in ACTIONS.items()}
OF_COMMANDS = [(rule.command, name) for rule in HERE for name in rule.options]
PAIRS = [
    (command, option, rule.other)
    for rule in WITH
    for option in rule.options
    for command, used in USED.items()
    if {option, rule.other} <= used
]
ALONE = [
    (command, option, rule.others)
    for rule in WITHOUT
    for option in rule.options
    for command, used in USED.items()
    if option in used and used & set(rule.others) - set(map(name_of, REQUIRED[command]))
]


def command_with(command: str, *names: str) -> list[str]:
    """A command line with arguments of these names."""
    words = [*command.split(), *NEEDED.get(command, [])]
    for name in names:
        action = ACTIONS[command][name]
        value = next(iter(action.choices)) if action.choices else VALUES.get(name, "1")
        if action.nargs == 0:
            words.append(name)
        else:
            words.append(f"{name}={value}" if action.option_strings else value)
    return words


def is_parsed(words: list[str]) -> bool:
    make_parser().parse_args(words)  # raises SystemExit otherwise
    return True


@pytest.mark.parametrize(("command", "option"), OF_COMMANDS)
def test_an_option_that_the_command_has_no_use_for(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(command_with(command, option)).refused(f"{command}: {option} cannot be used here: ")
    with pytest.raises(SystemExit):
        make_parser().parse_args([*command.split(), "--help"])
    assert option not in capsys.readouterr().out.split()


@pytest.mark.parametrize(("command", "option", "other"), PAIRS)
def test_an_option_beside_one_that_makes_it_do_nothing(
    command: str, option: str, other: str
) -> None:
    assert is_parsed(command_with(command, other))
    needed = [rule.others[0] for rule in WITHOUT if option in rule.options]
    assert is_parsed(command_with(command, option, *needed))
    for order in ((option, other), (other, option)):
        ended = run_here(command_with(command, *order))
        ended.refused(f"{command}: {option} cannot be used with {other}: ", "Leave one of them out")


@pytest.mark.parametrize(("command", "option", "others"), ALONE)
def test_an_option_without_those_that_it_belongs_to(
    command: str, option: str, others: tuple[str, ...]
) -> None:
    wanted = " or ".join(others)
    ended = run_here(command_with(command, option))
    ended.refused(f"{command}: {option} cannot be used without {wanted}: ", f"Add {wanted}")


def test_all_names_of_the_table_are_arguments() -> None:
    assert not [pair for pair in OF_COMMANDS if pair[1] not in ACTIONS[pair[0]]]
    assert {(option, other) for _, option, other in PAIRS} == {
        (option, rule.other) for rule in WITH for option in rule.options
    }
    assert {(option, others) for _, option, others in ALONE} == {
        (option, rule.others) for rule in WITHOUT for option in rule.options
    }


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["txt2img", "--eager", "--prec", "fp8"], "--precision"),
        (["txt2img", "--eager", "--precision=exact"], "--precision"),
        (["graphs", "explain", "0123", "-m", "a.safetensors"], "--model"),
        (["demo", "--eager", "--build", "wait"], "--build"),
    ],
)
def test_any_way_of_writing_an_option_counts(words: list[str], option: str) -> None:
    run_here(words).refused(f"{option} cannot be used with ")


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--no-build"],
        ["demo", "--eager", "--size", "own", "in"],
        ["demo", "--recursive", "in"],
        ["bench", "--build", "never", "--workers", "2"],
        ["warmup", "64x64", "--no-build", "--workers", "2"],
        ["img2img", "in", "--eager", "--store", "s", "--vae-tiling", "on", "--gpus", "2"],
        ["img2img", "in", "--ignore-vae", "--vae-tiling", "on", "--precision", "fp8"],
        ["txt2img", "--gpus", "2", "--cluster", "auto", "--graphs", "g", "--trust"],
        ["txt2img", "--gpus", "2", "--graphs", "g"],
        ["graphs", "explain", "0123", "--store", "s"],
        ["graphs", "explain", "-m", "a.safetensors", "--precision", "fp8"],
        ["graphs", "import", "file", "--trust", "--store-limit-gb", "1"],
        ["graphs", "prune", "--store-limit-gb", "1", "--older-than-days", "3"],
        ["ui", "--cfg-parallel", "--build", "never", "--vae-tiling", "off"],
    ],
    ids=" ".join,
)
def test_what_has_an_effect_is_taken(words: list[str]) -> None:
    """Defaults of a command count as not given: the demo builds with `wait`."""
    assert is_parsed(words)
