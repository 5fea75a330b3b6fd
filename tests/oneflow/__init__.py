"""Tests of the OneFlow backend; ``python -m tests.oneflow`` runs those that need OneFlow."""
