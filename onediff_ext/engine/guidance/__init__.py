"""Classifier-free guidance in some steps of a picture only."""
