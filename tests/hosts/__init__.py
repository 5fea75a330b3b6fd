"""Tests of the host adapters."""
