"""A UNet's forward with DeepCache: full calls, and shallow calls that reuse a feature."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onediff_ext.core.deepcache_options import OFF, DeepCacheOptions
from onediff_ext.engine.class_methods import forward_slot, inner_forward_of
from onediff_ext.engine.deepcache.features import Feature, Features
from onediff_ext.engine.deepcache.schedule import is_full
from onediff_ext.engine.deepcache.unet_adapter import Uncached, UNetAdapter, UNetCall
from onediff_ext.engine.forward_variants import ForwardVariant, set_variant
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import OutOfMemoryError, is_dynamo_tracing

logger = logging.getLogger(__name__)

IN_PARTS = "DeepCache is off: an extension draws the picture in parts"

# Called before each call of the UNet is decided, so that a host can begin pictures and evaluations.
Clock = Callable[["DeepCache", Sequence[Any], Mapping[str, Any]], None]

# By id of the UNet. Each keeps its UNet, so no other one gets its id.
_installed: weakref.WeakValueDictionary[int, DeepCache] = weakref.WeakValueDictionary()


class DeepCache(StandIn):
    """Decides for each call of one UNet whether it is a full or a shallow one, and runs it.

    It has to be the outermost wrapper of the UNet's forward, but for hooks of accelerate. A wrapper
    inside it, such as a CUDA graph, is called after the decision and only needs `variant`: within
    one variant a forward depends on its arguments and on the feature's tensor alone.

    Threads that draw with one UNet take turns, call by call: a call exchanges modules of the UNet.

    A *picture* is one run of a sampler; a hires pass is another one. An *evaluation* is one request
    of the sampler for a prediction; Heun makes two at each step. In one evaluation the UNet may be
    called several times, for instance with the prompt and without it. Each of these calls has a
    feature of its own.

    Args:
        model: The host's UNet.
        adapter: Knows the UNet's class.
        clock: Called before each call. None when the host calls `begin_picture` and
            `begin_evaluation`; without `begin_evaluation` each call counts as an evaluation.

    Attributes:
        model, adapter, clock: As given.
        options: For this picture and the next ones.
        counts: How many "full", "shallow" and "plain" calls this picture has had.
        reason: Why this picture runs without DeepCache, or None.
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
        self._inner = inner_forward_of(model)
        self._notes: dict[str, Hashable] = {}
        self._current: tuple[str, Feature] | None = None
        self._index, self._total = -1, None  # type: tuple[int, int | None]
        self._position, self._is_evaluation_begun = 0, False
        self._latents: dict[Hashable, torch.Tensor] = {}  # of this evaluation's calls, by kind
        self._lock = threading.RLock()

    def install(self) -> None:
        """Wrap the UNet's forward as it is now, under a hook of accelerate if there is one."""
        self._inner = inner_forward_of(self.model)
        self._patches.set(self.model, forward_slot(self.model), self)
        _installed[id(self.model)] = self

    def remove(self) -> bool:
        """Leave the UNet as it was before `install`, and release all memory.

        Returns:
            Whether the UNet's forward was restored. If not, another extension has wrapped this:
            from now on it passes calls through, and must not be installed again.
        """
        with self._lock:
            self.end_picture()
            if _installed.get(id(self.model)) is self:
                del _installed[id(self.model)]
            if not self._patches.undo():
                return True
        logger.warning("DeepCache: another extension has wrapped the UNet; now passing through")
        self.options = OFF
        return False

    @property
    def is_installed(self) -> bool:
        """Whether it wraps the UNet's forward."""
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
        """Begin a picture; features of earlier pictures become invalid.

        Args:
            options: For this picture and the next ones; None leaves them as they are.
            evaluations: How many there will be, or None when that is unknown. The options `start`,
                `end` and the nonuniform schedule are shares of it.
            first: Number of the first evaluation, from 0: another model may run the earlier ones.
            refusal_reason: Why this picture runs without DeepCache; it becomes `reason`.

        Raises:
            OptionError: The depth leaves out no layer.
        """
        chosen = self.options if options is None else options
        if options is not None:
            self.adapter.check(chosen)
        with self._lock:
            self.options = chosen
            self._features.release()
            self._index, self._total, self._position = first - 1, evaluations, 0
            self._is_evaluation_begun = False
            self.counts.clear()
            self.reason, self.peak_bytes = refusal_reason, 0

    def begin_evaluation(self) -> None:
        """The sampler asks for the next prediction; it lasts until this is called again."""
        self._is_evaluation_begun = True
        self._next_evaluation()

    def note(self, name: str, value: Hashable) -> None:
        """Note a value that features depend on, such as whether a ControlNet is in its range.

        A feature that was made with another value is not used.

        Args:
            name: What has this value.
            value: From now on, until the picture ends.
        """
        with self._lock:
            self._notes[name] = value

    def refuse(self, reason: str) -> None:
        """Run the rest of this picture without DeepCache.

        Args:
            reason: Why; it becomes `reason`.
        """
        self.reason = reason
        self._features.release()

    def invalidate(self) -> None:
        """Let no feature be used: weights have changed, for instance by a LoRA."""
        with self._lock:
            self._features.invalidate()

    def end_picture(self) -> None:
        """Release the features' memory, except what CUDA graphs hold."""
        with self._lock:
            self._features.release()
            self._latents.clear()
            self._notes.clear()

    @property
    def variant(self) -> Hashable:
        """The state that distinguishes the present forward from others with equal arguments.

        A CUDA graph of a forward belongs to one variant. It has to hold `feature`, whose address is
        frozen in it. `engine/forward_variants.py` tells both to the forward that is recorded.

        Returns:
            ("full" or "shallow", depth, serial number of the feature), or None while DeepCache
            takes no part.
        """
        if self._current is None:
            return None
        mode, feature = self._current
        return mode, self.options.depth, feature.serial

    @property
    def feature(self) -> Feature | None:
        """The feature of the forward that runs now; None while DeepCache takes no part."""
        return None if self._current is None else self._current[1]

    @property
    def size_bytes(self) -> int:
        """Memory of all features, including those that CUDA graphs hold."""
        return self._features.size_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing() or not self.options.is_on:
            return self._inner(*args, **kwargs)
        with self._lock:
            return self._decided(args, kwargs)

    def _decided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call as a full, a shallow or a plain one."""
        if self.clock is not None:
            self.clock(self, args, kwargs)
        if not self._is_evaluation_begun:
            self._next_evaluation()
        if self.reason is not None or torch.is_grad_enabled():
            self.counts["plain"] += 1
            return self._inner(*args, **kwargs)
        call = self._describe(args, kwargs)
        if isinstance(call, Uncached):
            self.counts["plain"] += 1
            self._position += 1
            return self._inner(*args, **kwargs)
        if not self._is_of_one_picture(call):
            self.refuse(IN_PARTS)
            self.counts["plain"] += 1
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
                    logger.info("DeepCache: no memory for a shallow call; running a full one")
            return self._run_full(feature, state, args, kwargs)
        finally:
            self._set_current(None)
            # Where the host begins evaluations, more calls may belong to the last one.
            last = self._total is not None and self._index == self._total - 1
            if last and (self.clock is not None or not self._is_evaluation_begun):
                self._features.release()

    def _describe(self, args: Any, kwargs: Any) -> UNetCall | Uncached:
        """As `UNetAdapter.describe`; an argument that it cannot read must not end an image."""
        try:
            return self.adapter.describe(args, kwargs)
        except Exception as exc:
            logger.warning("DeepCache: a call cannot be looked at", exc_info=True)
            return Uncached(f"a call cannot be looked at: {type(exc).__name__}: {exc}")

    def _set_current(self, current: tuple[str, Feature] | None) -> None:
        """Set what runs now, also for a captured forward inside."""
        self._current = current
        told = None if current is None else ForwardVariant(self.variant, (current[1],))
        set_variant(self.model, told)

    def _is_of_one_picture(self, call: UNetCall) -> bool:
        """Whether calls of one kind in one evaluation draw the same latent, such as CFG's two.

        Those of tiles do not. Tiles may move or change their order, and one would get the feature
        of another.
        """
        if call.latent is None:
            return True
        first = self._latents.setdefault(call.kind, call.latent)
        return first is call.latent or torch.equal(first, call.latent)

    def _next_evaluation(self) -> None:
        self._index += 1
        self._position = 0
        self._latents.clear()

    def _run_full(
        self, feature: Feature, state: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.counts["full"] += 1
        self._set_current(("full", feature))
        feature.filled_at, feature.is_torn = None, False
        with self.adapter.full(self.options.depth, feature):
            output = self._inner(*args, **kwargs)
        if feature.tensor is not None and not feature.is_torn:
            feature.filled_at, feature.state = self._index, state
            self.peak_bytes = max(self.peak_bytes, self.size_bytes)
        return output

    def _run_shallow(self, feature: Feature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._set_current(("shallow", feature))
        args, kwargs = self.adapter.shallow_arguments(self.options.depth, args, kwargs)
        with self.adapter.shallow(self.options.depth, feature):
            output = self._inner(*args, **kwargs)
        self.counts["shallow"] += 1
        return output


def deepcache_of(model: nn.Module) -> DeepCache | None:
    """Return the DeepCache that wraps a UNet's forward, or None.

    Args:
        model: The host's UNet.
    """
    forward = vars(model).get(forward_slot(model))
    return forward if isinstance(forward, DeepCache) else None


def installed_deepcache(model: nn.Module) -> DeepCache | None:
    """Return the DeepCache of a UNet, also where another extension has wrapped it since, or None.

    Args:
        model: The host's UNet.
    """
    return _installed.get(id(model))
