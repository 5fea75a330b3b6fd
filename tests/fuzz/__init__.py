"""Fuzzing: inputs that somebody else may have made, by the thousand.

    python -m pytest tests/fuzz          a short run, and every input that ever failed
    python -m tests.fuzz --minutes 60    a long one; what fails is kept in regressions/

A target is a strategy and a check. The check raises for what must not happen: an exception that is
none of the project's, too much time or memory, a round trip that ends elsewhere.
"""
