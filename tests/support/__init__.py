"""Doubles that tests of several packages share, with tests of their own."""
