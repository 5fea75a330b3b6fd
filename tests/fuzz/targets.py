"""All targets."""

from __future__ import annotations

from tests.fuzz import checkpoints, pictures, requests, stores

TARGETS = (*pictures.TARGETS, *requests.TARGETS, *checkpoints.TARGETS, *stores.TARGETS)
