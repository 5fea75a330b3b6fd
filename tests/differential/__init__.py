"""A compiled pipeline beside its eager twin, through random sequences of what people do to one.

`python -m tests.differential --seed S --steps N`; see `__main__.py`.
"""
