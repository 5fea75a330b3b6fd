"""The OneFlow backend. ``python -m tests.oneflow`` runs what needs OneFlow itself."""
