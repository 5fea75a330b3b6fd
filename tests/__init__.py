"""OneDiff's tests."""
