"""Entry point: parses, dispatches, turns errors into one clear message and an exit status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from onediff_ext import __version__
from onediff_ext.cli import bench, demo, doctor, graphs, img2img, txt2img, warmup
from onediff_ext.core.errors import OneDiffError

_COMMANDS = (img2img, txt2img, warmup, graphs, bench, doctor, demo)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 all well, 1 some pictures were skipped or something is wrong,
        2 bad arguments, 130 interrupted.
    """
    parser = argparse.ArgumentParser(
        prog="onediff-ext", description="Stable Diffusion at any size, without recompiling."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="say why graphs are built")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    arguments = parser.parse_args(argv)
    _set_up_logging(arguments.verbose)
    try:
        return int(arguments.run(arguments))
    except OneDiffError as exc:
        print(f"onediff-ext: {exc.message}", file=sys.stderr)
        if exc.hint:
            print(f"  {exc.hint}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on where it stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("onediff_ext").setLevel(logging.INFO if verbose else logging.WARNING)
    # Nothing is downloaded; the libraries' own chatter does not concern the user.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    sys.exit(main())
