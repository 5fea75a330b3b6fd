"""Every feature draws eager's picture, in the way that `docs/features.md` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features import catalogue  # noqa: F401
from tests.features.feature import FEATURES, Feature
from tests.features.table import row
from tests.features.trial import try_feature

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_is_run_as_the_page_says(feature: Feature, run_store: Path) -> None:
    outcome = try_feature(feature, run_store)
    assert outcome.error <= feature.tolerance
    assert row(feature, outcome) in PAGE.read_text("utf-8").splitlines()


def test_the_page_has_no_other_features() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| ---")]
    names = [line.split(" | ")[0].removeprefix("| ") for line in rows]
    assert [name for name in names if name != "feature"] == [f.name for f in FEATURES]
