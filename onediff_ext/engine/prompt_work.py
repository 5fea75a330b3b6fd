"""Work of a model's forward that depends on the prompt alone, done once a picture.

A transformer embeds the prompt at each step, and some refine it with blocks of their own. Here the
result is computed before the forward, by the host's own layers, and takes the prompt's place among
the forward's arguments. Within the forward these layers return what they are given. A CUDA graph of
the forward is recorded so, and reads the result as it reads any other input.

A result serves the same prompt tensors of the same picture, as the text KV cache does: neither they
nor the weights may have been written since, and the modules are what they were. The first forward
of a model is compared with one that has all of its work inside.
"""

from __future__ import annotations

import copy
import inspect
import logging
import operator
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onediff_ext.engine.blocks.arguments import named_arguments
from onediff_ext.engine.blocks.prompt_recipe import Arguments, Done, PromptRecipe
from onediff_ext.engine.blocks.weight_slots import rule_of
from onediff_ext.engine.checking.compare_with_eager import compare_all
from onediff_ext.engine.class_methods import ClassMethod, forward_of
from onediff_ext.engine.cuda_graphs.forward_call import tensors_of
from onediff_ext.engine.cuda_graphs.staleness import Snapshot
from onediff_ext.engine.cuda_graphs.trusted_modules import TrustedModules
from onediff_ext.engine.patches import Patches
from onediff_ext.engine.running.block_runner import BlockRunner, epoch_of
from onediff_ext.engine.running.text_kv import stamp_of
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import OutOfMemoryError, is_dynamo_tracing
from onediff_ext.engine.validity.foreign_code import replaced_methods
from onediff_ext.engine.validity.model_state import ModelState
from onediff_ext.engine.weak_tensors import WeakTensors, parts_of

logger = logging.getLogger(__name__)

_KEPT = 4  # results of prompts: guidance has two, each of another length perhaps
_NEVER = -1  # no epoch


class _Result(NamedTuple):
    """The result for one prompt.

    Args:
        prompt: The prompt's tensors.
        form: Which of the arguments were None.
        stamp: What the tensors were, from `stamp_of`.
        made_by: What the weights were, from `stamp_of`.
        value: Takes the prompt's place.
    """

    prompt: WeakTensors
    form: tuple[bool, ...]
    stamp: Hashable
    made_by: Hashable
    value: Any

    def is_current(self, epoch: Hashable, made_by: Hashable) -> bool:
        """Return whether prompt and weights are what they were.

        Args:
            epoch: Of this call.
            made_by: What the weights are now.
        """
        tensors = self.prompt.alive()
        return (
            tensors is not None
            and self.made_by == made_by
            and self.stamp == stamp_of(epoch, tensors[0], tensors[1:])
        )

    def serves(self, tensors: Sequence[torch.Tensor], form: tuple[bool, ...]) -> bool:
        """Return whether it is the result of these tensors.

        Args:
            tensors: The prompt's tensors of a call.
            form: Which of the arguments are None.
        """
        known = self.prompt.alive()
        return (
            known is not None
            and self.form == form
            and len(known) == len(tensors)
            and all(map(operator.is_, known, tensors))
        )


class PassThrough(StandIn):
    """Stands in place of a layer's forward, and returns its input where its work is done.

    Args:
        layer: Reads only the prompt, as `PromptRecipe.layers` returns them.
        done: Says when.

    Attributes:
        done: As given.
    """

    replaced = None

    def __init__(self, layer: nn.Module, done: Done) -> None:
        self._forward, self.done = forward_of(layer), done

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)  # a copied model does all of its work

    def __call__(self, x: torch.Tensor) -> Any:
        if is_dynamo_tracing():
            return self._forward(x)
        if self.done.now:
            return x
        if isinstance(self._forward, ClassMethod):
            self._forward.keep_if_taken(self)
        return self._forward(x)


class PromptWork:
    """Does the prompt's part of one model's forward ahead of it.

    Args:
        model: The host's module.
        recipe: Knows its forward.
        runners: The runners of its blocks.
        known: What its modules may be.

    Attributes:
        computed: How many results were computed.
        refusal_reason: Why the forward runs as it is, or "".
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: PromptRecipe,
        runners: Sequence[BlockRunner],
        known: TrustedModules,
    ) -> None:
        self._model, self._recipe, self._known = model, recipe, known
        self._runners, self._done = runners, Done()
        self._names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self._patches, self._lock = Patches(), threading.RLock()
        self._state: ModelState | None = None
        self._settings: Hashable = None
        self._weights = WeakTensors([])
        self._results: list[_Result] = []
        self._is_verified = self._was_compared = False
        self._unknown_in: int | None = _NEVER
        self._impure_in: int | None = _NEVER
        self.computed, self.refusal_reason, self._is_removed = 0, "", False

    def __call__(
        self,
        forward: Callable[[bool, Sequence[Any], Mapping[str, Any]], Any],
        unrecorded: Callable[[], AbstractContextManager[None]],
        eager: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a forward with the prompt's part ahead of it, where that is safe.

        Args:
            forward: Runs the model's forward; its first argument says whether the prompt's part
                was done.
            unrecorded: A context in which no CUDA graph is made of a forward.
            eager: The model's own forward.
            args, kwargs: Of the call.

        Returns:
            The output of the forward.
        """
        with self._lock:  # or another thread would take the stand-ins away halfway
            given = None if self._is_removed else self._substituted(args, kwargs)
            if given is None:
                self._results = []  # nobody has looked at what they were made of
            elif self._is_verified:
                with self._done.set():
                    return forward(True, (), given)
            else:
                # The first comparison mostly decides: the next forwards have that part done.
                judged = self._judged_calls()
                with nullcontext() if self._was_compared else unrecorded():
                    output = forward(False, args, kwargs)
                # Otherwise it has eager's results, which those in 8 bits differ from.
                if self._judged_calls() == judged:
                    self._was_compared = True
                    self._verify(eager, given, output)
                return output
        return forward(False, args, kwargs)

    def _judged_calls(self) -> int:
        """Calls of blocks so far that returned eager's result, to compare a graph with it."""
        return sum(runner.compared for runner in self._runners)

    def _may_run_twice(self) -> bool:
        """Whether nothing counts the calls of the model or of its parts: a step cache does."""
        is_pure = Snapshot(self._model, self._known).refusal_reason is None
        self._impure_in = _NEVER if is_pure else epoch_of(self._runners)
        return is_pure

    def _verify(self, eager: Callable[..., Any], given: dict[str, Any], output: Any) -> None:
        """Compare the forward behind the prompt's part with one that has all of its work inside."""
        try:
            with self._done.set():
                found = eager(**given)
            comparison = compare_all(tensors_of(found), tensors_of(output))
        except OutOfMemoryError:
            self._refuse("there is no memory to compare it")
            return
        if comparison.problem is not None:
            self._refuse(f"its result {comparison.problem}")
        self._is_verified = comparison.problem is None and comparison.decided

    def remove(self) -> None:
        """Restore the layers for good, once no other thread runs behind its prompt's part.

        A thread that still draws with the model does not replace them again.
        """
        with self._lock:
            self._is_removed = True
            self._restore()
            self._patches.undo()

    def _restore(self) -> None:
        self._patches.undo(keeps_covered=True)  # a hook may put them back when it goes
        for runner in self._runners:
            runner.done = None
        self._state = None
        self._results = []

    def _substituted(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments with the result in the prompt's place; None to run as it is."""
        named = named_arguments(self._names, args, kwargs)
        if named is None or torch.is_grad_enabled() or self.refusal_reason:
            return None
        if any(named.get(name) for name in self._recipe.without):
            return None
        try:
            if not self._is_ready():
                return None
            result = self._result(named)
        except OutOfMemoryError:
            raise
        except Exception as exc:  # a host of another version; the forward says what is wrong
            self._refuse(f"{type(exc).__name__}: {exc}")
            return None
        return None if result is None else {**named, self._recipe.prompt[0]: result}

    def _result(self, named: Arguments) -> Any:
        """Return the result for a call's prompt, computed if it is new; None without one."""
        prompt = [named.get(name) for name in self._recipe.prompt]
        leaves = pytree.tree_flatten(prompt)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or len(tensors) + sum(leaf is None for leaf in leaves) < len(leaves):
            return None
        weights = self._weights.alive()
        if not weights:
            return None
        epoch, form = epoch_of(self._runners), tuple(leaf is None for leaf in leaves)
        made_by = stamp_of(epoch, weights[0], weights[1:])
        stamp = stamp_of(epoch, tensors[0], tensors[1:])
        # What has changed once is never used again: freed memory may get other numbers.
        self._results = [known for known in self._results if known.is_current(epoch, made_by)]
        if made_by is None or stamp is None:
            return None
        for known in self._results:
            if known.serves(tensors, form):
                return known.value
        result = self._recipe.compute(self._model, named)
        if result is not None:
            self.computed += 1
            made = _Result(WeakTensors(tensors), form, stamp, made_by, result)
            self._results = [*self._results[1 - _KEPT :], made]
        return result

    def _is_ready(self) -> bool:
        """Whether the layers are known and what they were, and their work may be done ahead.

        They are looked at again if they changed.
        """
        epoch = epoch_of(self._runners)
        if epoch in (self._unknown_in, self._impure_in):
            return False
        if (
            self._state is not None
            and self._known.current_settings() == self._settings
            and self._state.holds(epoch=epoch)
        ):
            return self._is_verified or self._may_run_twice()
        self._restore()
        self._unknown_in = epoch
        model, recipe = self._model, self._recipe
        layers, blocks = list(recipe.layers(model)), list(recipe.blocks(model))
        parts = (*layers, *blocks, *recipe.helpers(model))
        modules = list(dict.fromkeys(module for part in parts for module in part.modules()))
        by_block = {runner.block: runner for runner in self._runners}
        if not self._are_known(modules) or not by_block.keys() >= set(blocks):
            return False
        if any(map(self._is_anothers, layers)):
            return False
        for layer in layers:
            self._patches.set(layer, "forward", PassThrough(layer, self._done))
        for block in blocks:
            by_block[block].done = self._done
        state = ModelState([model, *modules], model, self._known.code, parameters=True)
        if state.foreign_code_reason(self._known.trusted_patchers) is not None:
            self._restore()
            return False
        weights = [w for m in (*layers, *blocks) for w in (*m.parameters(), *m.buffers())]
        self._weights = WeakTensors(parts_of([*weights, *recipe.parameters(model)]))
        self._state, self._settings = state, self._known.current_settings()
        self._unknown_in = _NEVER
        self._is_verified = self._was_compared = False
        return self._may_run_twice()

    def _are_known(self, modules: Sequence[nn.Module]) -> bool:
        """Whether modules are the host's or those of known wrappers, without hooks of others."""
        wrappers = {type(m).__module__ for m in modules if rule_of(m, self._known.rules)}
        packages = [f"{name.partition('.')[0]}." for name in wrappers]
        known = (*self._known.prefixes, *packages)
        return all(
            f"{type(module).__module__}.{type(module).__qualname__}".startswith(known)
            and not (module._forward_hooks or module._forward_pre_hooks)
            and not replaced_methods(module)
            for module in modules
        )

    def _is_anothers(self, layer: nn.Module) -> bool:
        """Whether another model has the layer too, and does its own prompt's part by it."""
        forward = forward_of(layer)
        return isinstance(forward, PassThrough) and forward.done is not self._done

    def _refuse(self, reason: str) -> None:
        self.refusal_reason = reason
        logger.warning("%s embeds its prompt at each step: %s", type(self._model).__name__, reason)
        self._restore()
