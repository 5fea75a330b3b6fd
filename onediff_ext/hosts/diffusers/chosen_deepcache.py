"""The DeepCache of `compile_pipe`, which ends with the compilation."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from onediff_ext.core.deepcache_options import DeepCacheOptions
from onediff_ext.hosts.diffusers.deepcache import enable_deepcache, follow_unet, switch_of

# By the id of their options, which each keeps.
_choices: weakref.WeakValueDictionary[int, ChosenDeepCache] = weakref.WeakValueDictionary()


class ChosenDeepCache:
    """The DeepCache of one compiled pipeline, from the compilation to its end.

    A UNet has one DeepCache. Where pipelines share it, its options are those that were chosen last.
    At the end of a compilation they are those from before, unless somebody has chosen others since.

    Args:
        pipe: The pipeline.
        options: What `enable_deepcache` takes.

    Raises:
        OptionError: As `enable_deepcache`.
    """

    def __init__(self, pipe: Any, options: object) -> None:
        switch = switch_of(getattr(pipe, "unet", None))
        self._was_followed = switch is not None and switch.follower_of(pipe) is not None
        before = None if switch is None else switch.cache.options
        self._before = _choices.get(id(before), before)
        self._is_ended = False
        # An object of its own: the same options may be chosen by somebody else.
        self.options = replace(DeepCacheOptions.parse(options))
        enable_deepcache(pipe, self.options)
        switch = switch_of(pipe.unet)
        self._follower = None if switch is None else switch.follower_of(pipe)
        _choices[id(self.options)] = self

    def remove(self, pipe: Any) -> None:
        """Leave the pipeline, and other pipelines of its UNet, as they are without this choice."""
        self._is_ended = True
        follow_unet(pipe)
        switch = switch_of(getattr(pipe, "unet", None))
        if switch is None:
            return
        before = self._before
        while isinstance(before, ChosenDeepCache):
            before = before._before if before._is_ended else before.options
        is_in_use = switch.cache.options is self.options
        if is_in_use and before is not None:
            switch.cache.begin_picture(before)
        # The user may have enabled it for this pipeline since.
        is_followed_by_us = is_in_use or switch.follower_of(pipe) is self._follower
        if is_followed_by_us and not self._was_followed:
            switch.leave(pipe)
