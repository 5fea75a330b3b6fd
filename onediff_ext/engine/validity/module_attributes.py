"""Compares modules with what they were: children, hooks and attributes, by value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import chain, compress, repeat
from typing import Any

from torch import nn

from onediff_ext.engine.validity.once_per_image import OncePerImage
from onediff_ext.engine.validity.values import has_no_attributes, is_equal, is_mutable, value_of
from onediff_ext.engine.weak_tensors import WeakTensors, is_made_of_others, parts_of

# The attributes that torch itself keeps in every module.
INTERNAL = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str)
# Nobody calls them, so neither their attributes nor their hooks decide anything.
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict)
# The dictionaries of a module's parts, whose contents are compared while they are the same ones.
_CONTAINERS_OF = operator.itemgetter(
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
)
_CHILDREN_OF = operator.itemgetter("_modules")
_DICT_OF = operator.attrgetter("__dict__")
# Their weights, children and methods decide all. Their attributes only tell of them.
_SETTLED = (nn.Linear, nn.Identity)
# What accelerate leaves on a module whose forward it hooks. diffusers hooks models again with each
# picture (``enable_model_cpu_offload``). On the outer module the hook runs around all the rest.
# ``to`` is this package's (`hosts/pinned_moves.py`), for such a model.
_HOOKED = frozenset({"_hf_hook", "_old_forward", "to"})


class ModuleAttributes:
    """Children, hooks and attributes of modules at one moment.

    `hold` compares the attributes of all modules as one list. Values that can change in place are
    compared by content. Most of its time goes into reading objects from memory, so each object is
    read as seldom as possible.

    Args:
        modules: The modules, in order.
        outer: One of the modules. Its own hooks and ``forward`` run around the rest and do not
            count.
        ignored: Names of attributes that decide nothing.
        parameters: Whether a replaced Parameter counts.
        bare: Wrappers such as LoRA layers, and the layers that they brought. Of the wrappers only
            children, hooks and replaced methods count; the rest is followed in another way. So do
            they of a linear layer that was brought.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        outer: nn.Module,
        *,
        ignored: Collection[str] = (),
        parameters: bool = False,
        bare: Iterable[nn.Module] = (),
    ) -> None:
        self._modules, self._outer = list(modules), outer
        self._ignored = frozenset(ignored) | {"forward"}
        self._left_out = self._ignored - {"forward"}
        bare = list(bare)
        uncalled = {id(m) for m in bare if type(m) in _CONTAINERS}
        settled = {id(m) for m in bare if type(m) in _SETTLED}
        skipped = {id(m) for m in bare if not is_torchs(m)} | uncalled | settled | {id(outer)}
        self._dicts: list[dict[str, Any]] = []
        self._weight_dicts: list[dict[str, Any]] = []
        rest = [m for m in self._modules if id(m) in skipped and m is not outer]
        self._skipped = [m.__dict__ for m in rest]
        self._called = [m.__dict__ for m in rest if id(m) not in uncalled]
        self._uncalled = [m.__dict__ for m in rest if id(m) in uncalled]
        # A replaced method is one more attribute.
        self._lengths = list(map(len, self._skipped))
        self._containers_of_skipped = self._read_containers()
        for module in self._modules:
            if id(module) not in skipped:
                self._dicts.append(module.__dict__)
            self._dicts.append(module._modules)
            if module is not outer and id(module) not in uncalled:
                self._dicts += [module._forward_hooks, module._forward_pre_hooks]  # type: ignore[list-item]
            if parameters:
                self._weight_dicts += [module._parameters, module._buffers]
        # Most modules have no hooks, no buffers and no children. These stay empty.
        empty: list[Any] = [each for each in self._dicts if not each]
        self._dicts = [each for each in self._dicts if each]
        empty += [each for each in self._weight_dicts if not each]
        self._weight_dicts = [each for each in self._weight_dicts if each]
        self._wraps = any(map(is_made_of_others, self._all_weights()))
        weights = self._read_weights()
        self._weights = WeakTensors(each for each in weights if each is not None)
        self._absent_weights = _which_are_none(weights)
        self._naming = OncePerImage()
        self._names, self._values = self._read_names(), self._read()
        self._other_names = self._read_other_names()
        held = self._mutable_attributes(skipped - {id(outer)})
        empty += [value for value in held if type(value) in (list, dict, set) and not value]
        # Most attention processors. Their type and their dictionary say all that `value_of` does.
        bare_objects = [value for value in held if has_no_attributes(value)]
        empty += map(_DICT_OF, bare_objects)
        self._empty, known = empty, set(map(id, [*empty, *bare_objects]))
        self._contents = [(value, value_of(value)) for value in held if id(value) not in known]
        self._objects = [*self._modules, *bare_objects]
        self._types, self._own = list(map(type, self._objects)), list(map(_DICT_OF, self._objects))

    def hold(self, epoch: Hashable = None) -> bool:
        """Return whether they are what they were.

        Args:
            epoch: Equal for the calls of one image; names of attributes, of children and of weights
                are read once for them. None reads them each time.
        """
        if list(map(type, self._objects)) != self._types or any(self._empty):
            return False
        if not all(map(operator.is_, map(_DICT_OF, self._objects), self._own)):
            return False
        if list(map(len, self._skipped)) != self._lengths:
            return False
        if not all(map(operator.is_, self._read_containers(), self._containers_of_skipped)):
            return False
        if not self._has_its_weights():
            return False
        values = self._read()
        # By identity: an equal object may have other attributes, or change on its own later.
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if not (
            same and self._naming.holds(epoch, self._have_their_names)
        ) and not self._decides_the_same(values):
            return False
        return all(is_equal(value_of(value), content) for value, content in self._contents)

    def _have_their_names(self) -> bool:
        return self._read_names() == self._names and self._read_other_names() == self._other_names

    def _has_its_weights(self) -> bool:
        kept, now = self._weights.alive(), self._read_weights()
        if kept is None or _which_are_none(now) != self._absent_weights:
            return False
        if len(now) != len(kept):
            now = [each for each in now if each is not None]
        return all(map(operator.is_, kept, now))

    def _read_containers(self) -> list[object]:
        called = chain.from_iterable(map(_CONTAINERS_OF, self._called))
        return [*called, *map(_CHILDREN_OF, self._uncalled)]

    def _read_weights(self) -> list[Any]:
        return parts_of(self._all_weights()) if self._wraps else self._all_weights()

    def _all_weights(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._weight_dicts)))

    def _read(self) -> list[Any]:
        values = list(chain.from_iterable(map(dict.values, self._dicts)))
        for name, value in self._outer.__dict__.items():
            if name not in self._ignored and name not in _HOOKED:
                values += (name, value)
        return values

    def _read_names(self) -> list[str]:
        names = list(chain.from_iterable(self._dicts))
        for name in self._outer.__dict__:
            if name not in self._ignored and name not in _HOOKED:
                names += (name, name)
        return names

    def _read_other_names(self) -> list[str]:
        return list(chain.from_iterable([*self._weight_dicts, *self._skipped]))

    def _decides_the_same(self, values: list[Any]) -> bool:
        """Return whether everything except the ignored attributes is what it was.

        A host may rename each layer with every checkpoint, or note in a layer what it merged there.
        """
        if self._read_other_names() != self._other_names:
            return False
        names = self._read_names()
        compared, left, now = names, self._values, values
        if names != self._names:
            known, left = self._deciding(self._names, left)
            compared, now = self._deciding(names, now)
            if compared != known:
                return False
        # As a rule few of tens of thousands of values are others.
        others = compress(zip(compared, left, now, strict=True), map(operator.is_not, left, now))
        if not all(name in self._left_out or _are_equal(*both) for name, *both in others):
            return False
        self._names, self._values = names, values  # makes the next comparison quick
        return True

    def _deciding(self, names: list[str], values: list[Any]) -> tuple[list[str], list[Any]]:
        decides = [name not in self._left_out for name in names]
        return list(compress(names, decides)), list(compress(values, decides))

    def _mutable_attributes(self, skipped: Collection[int]) -> list[Any]:
        ignored = INTERNAL | self._ignored
        return [
            value
            for module in self._modules
            if id(module) not in skipped
            for name, value in module.__dict__.items()
            if name not in ignored and is_mutable(value)
        ]


def _which_are_none(values: Sequence[Any]) -> list[bool]:
    return list(map(operator.is_, values, repeat(None)))


def is_torchs(module: nn.Module) -> bool:
    """Return whether a module is of one of torch's own layers.

    Args:
        module: Any module.
    """
    return type(module).__module__.startswith("torch.nn.modules.")


def _are_equal(value: Any, other: Any) -> bool:
    return type(value) is type(other) and isinstance(value, _PLAIN) and bool(value == other)
