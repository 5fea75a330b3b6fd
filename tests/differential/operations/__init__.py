"""Everything that people do to a pipeline between two pictures; importing this registers all."""

from tests.differential.operations import (  # noqa: F401
    adapters,
    attributes,
    faults,
    foreign,
    pictures,
    processors,
    sessions,
    structure,
    weights,
)
