"""The description of one run over folders of images, the same for every host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onediff_ext.core.errors import OptionError
from onediff_ext.pictures.batch.grouping import PlannedPicture
from onediff_ext.pictures.canvas_sizes import MAX_MEGAPIXELS
from onediff_ext.pictures.naming import NameTemplate
from onediff_ext.pictures.size_rules import SizeRule

MAX_BATCH_SIZE = 64


@dataclass(frozen=True)
class BatchJob:
    """One run over folders of images.

    Args:
        inputs: Files and folders.
        output_dir: The folder of the results.
        size_rule: The size of each result.
        seed: The seed of every image.
        vary_seed: Add the image's index to the seed.
        batch_size: Images of one size drawn together, from 1 to `MAX_BATCH_SIZE`.
        name_template: The names of the results.
        recursive: Search subfolders too.
        captions: Use ``cat.txt`` beside ``cat.jpg`` as that image's prompt.
        keep_alpha: Give each result the transparency of its input.
        max_megapixels: Larger results are left out, in millions of pixels.

    Raises:
        OptionError: `batch_size` is out of range.
    """

    inputs: Sequence[Path]
    output_dir: Path
    size_rule: SizeRule
    seed: int
    vary_seed: bool = False
    batch_size: int = 4
    name_template: NameTemplate = field(default_factory=NameTemplate)
    recursive: bool = False
    captions: bool = False
    keep_alpha: bool = False
    max_megapixels: float = MAX_MEGAPIXELS

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= MAX_BATCH_SIZE:
            raise OptionError(
                f"Pictures at once must be 1 to {MAX_BATCH_SIZE}.", "Use 1 if memory is short."
            )

    def seed_of(self, planned: PlannedPicture) -> int:
        """Return an image's seed; it does not depend on the grouping into batches."""
        return self.seed + (planned.index if self.vary_seed else 0)

    def digest_settings(self, planned: PlannedPicture) -> dict[str, object]:
        """Return the job's part of the settings that a result depends on.

        Batch size and grouping are no part of it: they do not change an image.
        """
        return {
            "seed": self.seed_of(planned),
            "size_rule": str(self.size_rule),
            "keep_alpha": self.keep_alpha,
        }
