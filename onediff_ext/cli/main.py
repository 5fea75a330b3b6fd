"""Entry point: parses the words, runs the command, and turns errors into a message and a status."""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from onediff_ext import __version__
from onediff_ext.cli import (
    bench,
    demo,
    doctor,
    graphs,
    img2img,
    txt2img,
    ui,
    unused_options,
    warmup,
)
from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.words import printable

_PROGRAM = "onediff-ext"
_COMMANDS = (img2img, txt2img, ui, warmup, graphs, bench, doctor, demo)
_STOPPED = 128  # the shell's convention: 128 + the signal's number


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in two lines, like every other error of the command line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given: set[str] = set()

    def error(self, message: str, hint: str = "") -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}\n  {hint}See `{self.prog} --help`.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown words and unused options here, where the command's options are known.

        argparse collects unknown words of all commands, and names the help of the whole program.
        """
        command = self.prog.removeprefix(_PROGRAM).strip()
        for action in self._actions:
            if unused_options.name_of(action) in unused_options.unused_here(command):
                action.help = argparse.SUPPRESS
        self._given.clear()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            option = unknown[0].partition("=")[0].lstrip("-")
            known = [name[2:] for name in self._option_string_actions if name.startswith("--")]
            nearest = difflib.get_close_matches(option, known, 1)
            hint = f"Did you mean --{nearest[0]}? " if nearest else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}", hint)
        known = [unused_options.name_of(action) for action in self._actions]
        for message, hint in unused_options.refusals(command, known, self._given):
            self.error(message, f"{hint} ")
        return found, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse asks for the values of each argument that the user has written, under any of
        # its names, and of positional ones that are left out.
        if action.option_strings or arg_strings:
            self._given.add(unused_options.name_of(action))
        return super()._get_values(action, arg_strings)


class PrintableFormatter(logging.Formatter):
    """Escapes control characters in log lines, because names in them come from files."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


class Stopped(KeyboardInterrupt):
    """The system asks the process to end. Running code handles it like Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 success, 1 images were skipped or a check failed, 2 the command cannot be
        done, 130 interrupted, 143 ended by the system.
    """
    parser = make_parser()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As the standard error does: a code page may lack letters of a file's name.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = parser.parse_args(argv)
    # Skips the garbage collector's pass over all imported objects at the end of the process.
    atexit.register(gc.freeze)
    _set_up_logging(arguments.verbose)
    received: list[int] = []
    try:
        with _signals_as_interrupts(received):
            return int(arguments.run(arguments))
    except OneDiffError as exc:
        print(f"onediff-ext: {printable(exc.message)}", file=sys.stderr)
        if exc.hint:
            print(f"  {printable(exc.hint)}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as exc:
        if not _is_out_of_memory(exc):
            raise
        print("onediff-ext: There is not enough memory.", file=sys.stderr)
        print("  Use smaller sizes, fewer at once, or close other programs.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nStopped. {getattr(arguments, 'when_stopped', '')}".rstrip(), file=sys.stderr)
        return _STOPPED + (received[-1] if received else signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog=_PROGRAM, description="Stable Diffusion at any size, without recompiling.")
    parser.add_argument("--version", action="version", version=__version__)
    _add_verbose(parser, default=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    for command in commands.choices.values():  # -v is accepted before and after the command
        _add_verbose(command, default=argparse.SUPPRESS)
    return parser


def _add_verbose(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="say why graphs are built", default=default
    )


def _is_out_of_memory(exc: BaseException) -> bool:
    from onediff_ext.engine.out_of_memory import is_out_of_memory

    return is_out_of_memory(exc)


@contextmanager
def _signals_as_interrupts(received: list[int]) -> Iterator[None]:
    """Turn the system's signals into an interrupt, so that workers and temporary folders go.

    Args:
        received: Gets the signals' numbers. The interrupt does not say which one it was: Ray's
            native code replaces it by a plain KeyboardInterrupt.
    """

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
        received.append(signal_number)
        raise Stopped

    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        # Handlers of the calling program stay, and so does nohup's "ignore".
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            try:
                before[number] = signal.signal(number, stop)
            except ValueError:  # not the main thread: another program calls us
                break
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _set_up_logging(verbose: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("onediff_ext").setLevel(logging.INFO if verbose else logging.WARNING)
    # Nothing is downloaded; the libraries' own messages do not concern the user.
    if not verbose and not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    sys.exit(main())
