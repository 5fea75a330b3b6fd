"""What stands in the place of a UNet's forward: full calls and shallow ones."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.core.errors import OptionError
from onediff_ext.engine.deepcache.features import Feature, Features
from onediff_ext.engine.deepcache.schedule import is_full
from onediff_ext.engine.deepcache.unet_adapter import Uncached, UNetAdapter
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.torch_versions import OutOfMemoryError

logger = logging.getLogger(__name__)

# Told of each call before it is decided, so that a host can begin pictures and evaluations.
Clock = Callable[["DeepCache", Sequence[Any], Mapping[str, Any]], None]


class DeepCache:
    """Decides for each call of one UNet whether it is a full or a shallow one, and runs it.

    It has to be the outermost of what is put around the UNet's forward: what lies inside, a
    capture say, is called once the decision is taken, and may rely on `variant` alone. Within
    one variant a forward depends on its arguments and on the feature's tensor only.

    A *picture* is one run of a sampler (a hires pass is another one). An *evaluation* is one
    time that the sampler asks for a prediction: Heun does so twice a step; for one evaluation
    the UNet may be called several times, once with the prompt and once without say, and each
    of these calls has a feature of its own.

    Args:
        model: The host's UNet.
        adapter: Knows its class.
        clock: Called before each call; None when the host tells of pictures and evaluations by
            `begin_picture` and `begin_evaluation`. A host that tells of no evaluations counts
            every call as one.

    Attributes:
        options: For the pictures from now on.
        counts: "full", "shallow" and "plain" calls of this picture.
        reason: Why this picture does without, or None.
        peak_bytes: Most memory that features took in this picture.
    """

    def __init__(self, model: nn.Module, adapter: UNetAdapter, clock: Clock | None = None) -> None:
        self.model, self.adapter, self.clock = model, adapter, clock
        self.options = OFF
        self.counts: Counter[str] = Counter()
        self.reason: str | None = None
        self.peak_bytes = 0
        self._features = Features()
        self._patches = Patches()
        self._inner: Callable[..., Any] = model.forward
        self._notes: dict[str, Hashable] = {}
        self._current: tuple[str, Feature] | None = None
        self._index, self._total = -1, None  # type: tuple[int, int | None]
        self._position, self._told = 0, False

    def install(self) -> None:
        """Stand around the UNet's forward as it is now."""
        self._inner = self.model.forward
        self._patches.set(self.model, "forward", self)

    def remove(self) -> bool:
        """Leave the UNet as it was before `install`, and give all memory back.

        Returns:
            Whether it could be; otherwise this passes calls on from now, and must not be installed
            again.
        """
        self.end_picture()
        if not self._patches.undo():
            return True
        # Somebody has wrapped us since, and goes on calling us.
        logger.warning("DeepCache: another extension has wrapped the UNet; now passing through")
        self.options = OFF
        return False

    @property
    def is_installed(self) -> bool:
        """Whether it stands around the UNet's forward."""
        return len(self._patches) > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        # A copied model runs its own forward.
        return copy.deepcopy(self._inner, memo)

    def begin_picture(
        self,
        options: DeepCacheOptions | None = None,
        *,
        evaluations: int | None = None,
        first: int = 0,
        refusal_reason: str | None = None,
    ) -> None:
        """Begin a picture, a pass of one, or a run of a sampler; features of another are void.

        Args:
            options: For this picture and the next ones; None leaves them as they are.
            evaluations: How many there will be, if known: `start`, `end` and the nonuniform
                schedule are shares of it.
            first: Number of the first one: another model may have drawn those before.
            refusal_reason: Why this picture has to do without; it becomes `reason`.

        Raises:
            OptionError: The depth leaves nothing out.
        """
        if options is not None:
            if options.is_on and options.depth > self.adapter.max_depth():
                raise OptionError(
                    f"A DeepCache depth of {options.depth} leaves nothing of this UNet out.",
                    f"Choose 0 to {self.adapter.max_depth()}.",
                )
            self.options = options
        self._features.release()
        self._index, self._total, self._position = first - 1, evaluations, 0
        self._told = False
        self.counts.clear()
        self.reason, self.peak_bytes = refusal_reason, 0

    def begin_evaluation(self) -> None:
        """Say that the sampler asks for another prediction, until the next time that it is said."""
        self._told = True
        self._next_evaluation()

    def note(self, name: str, value: Hashable) -> None:
        """Tell what else features depend on, such as whether a ControlNet is in its range.

        A feature made under another value is not used.
        """
        self._notes[name] = value

    def invalidate(self) -> None:
        """Void all features: weights have changed, a LoRA for instance."""
        self._features.invalidate()

    def end_picture(self) -> None:
        """Give the features' memory back, but for what captures hold."""
        self._features.release()
        self._notes.clear()

    @property
    def variant(self) -> Hashable:
        """What distinguishes the forward that runs now from others with equal arguments.

        None while DeepCache takes no part; else ("full" or "shallow", depth, a number for the
        feature). A capture of a forward belongs to one variant; it has to hold `feature`, whose
        address is frozen in it. An inner forward with an attribute `variant` is told both, the
        feature as `keeps`.
        """
        if self._current is None:
            return None
        mode, feature = self._current
        return mode, self.options.depth, feature.serial

    @property
    def feature(self) -> Feature | None:
        """What the forward that runs now writes or reads; None while DeepCache takes no part."""
        return None if self._current is None else self._current[1]

    @property
    def size_bytes(self) -> int:
        """Memory of all features, those held by captures included."""
        return self._features.size_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.options.is_on:
            return self._inner(*args, **kwargs)
        if self.clock is not None:
            self.clock(self, args, kwargs)
        if not self._told:
            self._next_evaluation()
        if self.reason is not None or torch.is_grad_enabled():
            self.counts["plain"] += 1
            return self._inner(*args, **kwargs)
        call = self.adapter.describe(args, kwargs)
        if isinstance(call, Uncached):
            self.counts["plain"] += 1
            self._position += 1
            return self._inner(*args, **kwargs)
        feature = self._features.of((self.options.depth, self._position, call.kind), call.batch)
        state = (call.state, tuple(sorted(self._notes.items())))
        self._position += 1
        try:
            if feature.state == state and not is_full(
                self.options, self._index, self._total, feature.filled_at
            ):
                try:
                    return self._run_shallow(feature, args, kwargs)
                except OutOfMemoryError:
                    logger.info("DeepCache: no memory for a shallow call, so a full one is run")
            return self._run_full(feature, state, args, kwargs)
        finally:
            self._tell(None)
            # Where the host tells of evaluations, more calls may belong to the last one.
            last = self._total is not None and self._index == self._total - 1
            if last and (self.clock is not None or not self._told):
                self._features.release()

    def _tell(self, current: tuple[str, Feature] | None) -> None:
        """Say what runs now, also to a capture of the forward, if that is what lies inside."""
        self._current = current
        inner: Any = self._inner
        if hasattr(inner, "variant"):
            inner.variant, inner.keeps = self.variant, self.feature

    def _next_evaluation(self) -> None:
        self._index += 1
        self._position = 0

    def _run_full(
        self, feature: Feature, state: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.counts["full"] += 1
        self._tell(("full", feature))
        feature.filled_at, feature.is_torn = None, False
        with self.adapter.full(self.options.depth, feature):
            output = self._inner(*args, **kwargs)
        if feature.tensor is not None and not feature.is_torn:
            feature.filled_at, feature.state = self._index, state
            self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        return output

    def _run_shallow(self, feature: Feature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._tell(("shallow", feature))
        args, kwargs = self.adapter.shallow_arguments(self.options.depth, args, kwargs)
        with self.adapter.shallow(self.options.depth, feature):
            output = self._inner(*args, **kwargs)
        self.counts["shallow"] += 1
        return output


def deepcache_of(model: nn.Module) -> DeepCache | None:
    """What stands around a UNet's forward, if it is this."""
    forward = vars(model).get("forward")
    return forward if isinstance(forward, DeepCache) else None
