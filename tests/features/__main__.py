"""Write `docs/features.md`: ``python -m tests.features``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.features import catalogue  # noqa: F401
from tests.features.feature import FEATURES
from tests.features.table import page, row
from tests.features.trial import Outcome, try_feature
from tests.support.quick_builds import quick_builds, quick_loads

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"


def main() -> int:
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as store, quick_builds(), quick_loads():
        for feature in FEATURES:
            outcome = outcomes[feature.name] = try_feature(feature, Path(store))
            print(row(feature, outcome), f"{outcome.error:.1e}", flush=True)
            if not outcome.error <= feature.tolerance:
                print(f"{feature.name}: the picture differs from eager's.", file=sys.stderr)
                return 1
    PAGE.write_text(page(outcomes), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
