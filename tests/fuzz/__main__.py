"""The long run: target after target with more examples each round, until the time is up.

    python -m tests.fuzz --minutes 60 [--target NAME] [--seed N] [--report FILE]

What fails is made as small as it gets, written into regressions/, and named in the report (JSON).
The exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.target import Target, keep

FIRST_EXAMPLES = 100


@dataclass(frozen=True)
class Failure:
    """What a target must not do, and the smallest input for it.

    Args:
        target: Its name.
        value: The input.
        error: What was raised.
        seed: Of the run that found it.
        kept: The file with the input.
    """

    target: str
    value: Any
    error: str
    seed: int
    kept: str = ""


def find_failure(target: Target, *, examples: int, seed: int) -> Failure | None:
    """Try a target on new inputs.

    Returns:
        The failure with the smallest input that was found; None when there is none.
    """
    failed: list[tuple[Any, BaseException]] = []
    run = _run_of(target, examples, seed, failed)
    try:
        run()
    except BaseException as exc:
        if isinstance(exc, (KeyboardInterrupt, SystemExit)) and not failed:
            raise
        # Hypothesis tries the smallest input last.
        value, error = failed[-1] if failed else (None, exc)
        text = "".join(traceback.format_exception_only(error)).strip()
        frames = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in frames)
        return Failure(target.name, value, f"{text[:300]}{where}", seed)
    return None


def _run_of(
    target: Target, examples: int, number: int, failed: list[tuple[Any, BaseException]]
) -> Any:
    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(target.inputs)
    def attempt(value: Any) -> None:
        try:
            target(value)
        except BaseException as exc:
            failed.append((value, exc))
            raise

    return attempt


def main(argv: list[str] | None = None) -> int:
    """Run until the time is up; 1 when something failed."""
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--target", action="append", choices=[target.name for target in TARGETS])
    parser.add_argument("--seed", type=int, help="of the first round (default: another each time)")
    parser.add_argument("--report", type=Path, help="write what happened as JSON")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    end = time.monotonic() + 60 * arguments.minutes
    number = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    left = [target for target in TARGETS if target.name in (arguments.target or [target.name])]
    examples, tried = FIRST_EXAMPLES, {target.name: 0 for target in left}
    failures: list[Failure] = []
    while left and time.monotonic() < end:
        for target in list(left):
            if time.monotonic() >= end:
                break
            failure = find_failure(target, examples=examples, seed=number)
            tried[target.name] += examples
            if failure is not None:
                left.remove(target)  # it would find the same one again
                kept = keep(target, failure.value)
                failures.append(Failure(**{**asdict(failure), "kept": kept.name}))
                print(f"{target.name}: {failure.error}\n  kept in {kept}", file=sys.stderr)
        examples, number = min(2 * examples, 10_000), number + 1
    report = {"tried": tried, "failures": [_shown(failure) for failure in failures]}
    text = json.dumps(report, indent=1)
    if arguments.report is not None:
        arguments.report.write_text(text + "\n", encoding="ascii")
    print(text)
    return 1 if failures else 0


def _shown(failure: Failure) -> dict[str, Any]:
    value = failure.value
    return {
        **asdict(failure),
        "value": value if not isinstance(value, bytes) else value.hex()[:400],
    }


if __name__ == "__main__":
    sys.exit(main())
