"""One picture on two devices: half of a denoiser's batch on each, such as prompt and negative.

Both halves are launched from one thread, and on GPUs nothing waits: the devices wait for each
other's results. A result is compared with the whole forward on one device after each change of the
replica. Whatever cannot be split runs on one device, and the status says why. So does a size whose
forwards are not faster on two devices, measured by its first ones.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from onediff_ext.core.errors import OneDiffError
from onediff_ext.core.words import first_line
from onediff_ext.engine.cfg_parallel.call_halves import (
    NOTHING_TO_SPLIT,
    CallHalves,
    Half,
    joined_on,
)
from onediff_ext.engine.cfg_parallel.model_replica import Difference, ModelReplica
from onediff_ext.engine.cfg_parallel.second_device import second_device
from onediff_ext.engine.checking.compare_with_eager import QUANTIZED_TOLERANCE, compare_all
from onediff_ext.engine.cuda_graphs.cache import CapturedGraph
from onediff_ext.engine.cuda_graphs.forward_call import ForwardCall, read_call, tensors_of
from onediff_ext.engine.cuda_graphs.staleness import DYNAMIC_WEIGHTS, Snapshot
from onediff_ext.engine.running.block_runner import BlockRunner
from onediff_ext.engine.torch_versions import OutOfMemoryError
from onediff_ext.session.model_component import Component
from onediff_ext.session.speed_trial import SpeedTrial

logger = logging.getLogger(__name__)

WHAT = "CFG parallel"
CHANGES = "the model changes while a picture is drawn"
DEEPCACHE = "DeepCache keeps its features on one device"
_FOR_GOOD = object()  # in place of an epoch

Forward = Callable[[Sequence[Any], dict[str, Any]], Any]


class CfgParallel:
    """Runs the forwards of one component on two devices.

    Args:
        component: Of a denoiser.
        wanted: The other device, as for `second_device`.

    Attributes:
        devices: Both devices, while forwards are split.
        reason: Why the last forward ran on one device, or "".
        comparisons: How often results were compared with those of one device.
    """

    def __init__(self, component: Component, wanted: str) -> None:
        self._component, self._wanted = component, wanted
        self._session = component.session
        self._halves = CallHalves()
        self._replica: ModelReplica | None = None
        self._replica_component: Component | None = None
        self._ready_in: Hashable = None  # the epoch in which the replica was brought up to date
        self._refused_in: Hashable = None
        self._refusal = ""
        self._compared: set[Hashable] = set()
        self._trials: dict[Hashable, SpeedTrial] = {}  # by the key of the whole call
        self.comparisons = 0
        self._looked_at: weakref.ref[CapturedGraph] | None = None
        self.devices: tuple[torch.device, ...] = ()
        self.reason = ""

    @property
    def replica(self) -> Component | None:
        """Serves the copy of the model on the other device, while there is one."""
        return self._replica_component

    @property
    def runners(self) -> list[BlockRunner]:
        """The runners of the replica's blocks."""
        return [] if self._replica_component is None else self._replica_component.runners

    def __call__(self, run: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one forward.

        Args:
            run: Runs the model's forward on its own device.
            args, kwargs: Of the call.
        """
        output = self._on_both(run, args, kwargs)
        if output is None:
            self.devices = ()
            self._session.fell_back(WHAT, self.reason)
            return run(args, kwargs)
        return output[0]

    def remove(self) -> None:
        """Free the replica."""
        if self._replica_component is not None:
            self._replica_component.remove()
        self._replica = self._replica_component = None
        self._ready_in, self.devices = None, ()
        self._compared.clear()
        self._trials.clear()
        self._halves.forget()

    def _on_both(
        self, run: Forward, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """The output of both devices; None with a reason when one has to do it."""
        epoch = self._session.epoch
        call = read_call(args, kwargs)
        if isinstance(call, str):
            return self._not_now(call)
        if self._refused_in in (epoch, _FOR_GOOD):
            return self._not_now(self._refusal)
        if self._component.keeps_features:
            return self._not_now(DEEPCACHE)
        if self._component.foreign is not None:
            return self._not_now(self._component.foreign)
        device = second_device(self._wanted, call.device)
        if isinstance(device, str):
            return self._not_now(device)
        halves = self._halves.split(args, kwargs, call.device, device, epoch)
        if halves is None:
            return self._not_now(NOTHING_TO_SPLIT)
        trial = self._trial_of(call)
        if trial.slower:
            return self._not_now(self._told_slower(trial))
        is_prepared = self._ready_in == epoch
        if not is_prepared and not self._prepare(device, epoch):
            return None
        stop = trial.start(call.device)
        if trial.is_ones_turn:
            found = run(args, kwargs)
            stop()
            return (found,)
        output = self._run_halves(run, *halves, call)
        if output is None:
            return None
        stop()
        # While both devices are busy.
        if is_prepared and not self._is_still(epoch):
            return self._refuse(CHANGES, epoch)
        self._note_looked_at()
        call.containers.apply(halves[1].containers.changes() or ())
        self.reason, self.devices = "", (call.device, device)
        if call.form in self._compared:
            return output
        return self._compared_with_one(run, args, kwargs, call, output[0])

    def _trial_of(self, call: ForwardCall) -> SpeedTrial:
        """The trial of the call's size, with the graphs that there are now."""
        graphs = sum(kind.graph is not None for kind in self._session.kinds)
        trial = self._trials.get(call.key)
        if trial is None or trial.graphs != graphs:
            trial = self._trials[call.key] = SpeedTrial(graphs)
        trial.judge()
        return trial

    def _told_slower(self, trial: SpeedTrial) -> str:
        captured = None if self.replica is None else self.replica.captured
        because = f" ({captured.reason})" if captured is not None and captured.reason else ""
        return f"two GPUs are slower here: {trial.slower}{because}"

    def _run_halves(
        self, run: Forward, theirs: Half, mine: Half, call: ForwardCall
    ) -> tuple[Any] | None:
        component, replica = self._replica_component, self._replica
        assert component is not None
        assert replica is not None
        self._session.drew(component)
        try:
            with _current(replica.device):
                other = component.compute(theirs.args, theirs.kwargs)
        except OutOfMemoryError:
            return self._refuse(f"memory is short on {replica.device}", self._session.epoch)
        except Exception as exc:
            logger.warning("%s: the replica failed", WHAT, exc_info=True)
            return self._refuse(f"the replica failed: {_told(exc)}", _FOR_GOOD)
        return (joined_on(call.device, other, run(mine.args, mine.kwargs)),)

    def _compared_with_one(
        self,
        run: Forward,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        call: ForwardCall,
        output: Any,
    ) -> tuple[Any] | None:
        """Compare the output of both devices with that of one, which counts."""
        expected = run(args, kwargs)
        self.comparisons += 1
        is_exact = self._session.precision not in ("fp8", "int8")
        comparison = compare_all(
            tensors_of(output), tensors_of(expected), None if is_exact else QUANTIZED_TOLERANCE
        )
        if comparison.problem is not None:
            problem = f"the result of two devices {comparison.problem}"
            logger.warning("%s: %s", WHAT, problem)
            self._refuse(problem, _FOR_GOOD)
            self.devices = ()
            self._session.fell_back(WHAT, problem)
        elif comparison.decided:
            self._compared.add(call.form)
        return (expected,)

    def _is_still(self, epoch: Hashable) -> bool:
        """Whether the replica is what the model is; both may run other code than before."""
        assert self._replica is not None
        replayed_from = self._component.replayed_from
        known = None if self._looked_at is None else self._looked_at()
        if replayed_from is not None and replayed_from is known:
            return self._replica.weights_are_unwritten()
        difference = self._replica.difference(epoch)
        if difference is Difference.CODE:
            self._forget_results()
        return difference in (Difference.NOTHING, Difference.CODE)

    def _note_looked_at(self) -> None:
        """The model was looked at; while its half is replayed from this CUDA graph, it is that."""
        replayed_from = self._component.replayed_from
        self._looked_at = None if replayed_from is None else weakref.ref(replayed_from)

    def _forget_results(self) -> None:
        """The model is another one: record the replica again, and compare with one device again."""
        self._compared.clear()
        if self._replica_component is not None:
            self._replica_component.forget_cuda_graphs()

    def _prepare(self, device: torch.device, epoch: Hashable) -> bool:
        """Bring the replica up to date at the first forward of a picture."""
        try:
            if self._replica is not None and self._replica.device == device:
                difference = self._replica.difference(epoch)
                if difference is Difference.WEIGHTS:
                    self._replica.copy_weights()
                if difference is not Difference.NOTHING:
                    self._forget_results()
                if difference is not Difference.MORE:
                    self._ready_in = epoch
                    return True
            return self._make_replica(device, epoch)
        except OutOfMemoryError:
            self._refuse(f"memory is short on {device}", epoch)
        except Exception as exc:
            logger.warning("%s: the model cannot be copied", WHAT, exc_info=True)
            self._refuse(f"the model cannot be copied: {_told(exc)}", _FOR_GOOD)
        return False

    def _make_replica(self, device: torch.device, epoch: Hashable) -> bool:
        self.remove()
        component = self._component
        model: nn.Module = component.model
        snapshot = Snapshot(model, component.known)
        reason = snapshot.refusal_reason
        if reason is None and snapshot.has_weight_functions:
            reason = DYNAMIC_WEIGHTS
        if reason is None and not snapshot.is_per_image:
            reason = f"a {type(model).__qualname__} is not known to draw each image by itself"
        if reason is None and len(snapshot.devices) > 1:
            reason = "part of the weights is on another device (offloading)"
        if reason is not None:
            self._refuse(reason, epoch)
            return False
        self._replica = ModelReplica(model, component.known, device)
        copied = Component(
            component.identity,
            self._replica.model,
            self._session,
            channels_last=True,
            is_private=True,
        )
        copied.install()
        self._replica_component, self._ready_in = copied, epoch
        logger.info("%s: %s is on %s, too", WHAT, component.name, device)
        return True

    def _refuse(self, reason: str, epoch: Hashable) -> tuple[Any] | None:
        """Run on one device for the rest of a picture, or for good."""
        self._refused_in, self._refusal = epoch, reason
        self._ready_in = None
        if epoch is _FOR_GOOD:
            self.remove()
        return self._not_now(reason)

    def _not_now(self, reason: str) -> tuple[Any] | None:
        self.reason = reason
        return None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _told(exc: Exception) -> str:
    text = exc.message if isinstance(exc, OneDiffError) else f"{type(exc).__name__}: {exc}"
    return first_line(text, type(exc).__name__)
