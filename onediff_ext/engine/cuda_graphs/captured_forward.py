"""A model's forward, replayed as a CUDA graph where that is safe."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onediff_ext.core.errors import CaptureError, ModelChangedError
from onediff_ext.engine.class_methods import ClassForward
from onediff_ext.engine.cuda_graphs.attribute_rollback import scales_of_call
from onediff_ext.engine.cuda_graphs.cache import CapturedGraph, CudaGraphCache
from onediff_ext.engine.cuda_graphs.forward_call import ForwardCall, read_call
from onediff_ext.engine.cuda_graphs.forward_recorder import ForwardRecorder
from onediff_ext.engine.cuda_graphs.model_tracker import FrozenState, ModelTracker
from onediff_ext.engine.cuda_graphs.oom_fallback import OomFallback, Retry, retry_of
from onediff_ext.engine.cuda_graphs.recorder import Recorder
from onediff_ext.engine.cuda_graphs.recording_gain import RecordingGain
from onediff_ext.engine.cuda_graphs.recording_policy import RecordingPolicy
from onediff_ext.engine.cuda_graphs.replay_checks import UNDECIDED, ReplayChecks
from onediff_ext.engine.cuda_graphs.trusted_modules import TrustedModules
from onediff_ext.engine.forward_variants import KeptTensors
from onediff_ext.engine.running.block_runner import BlockRunner, epoch_of
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_versions import OutOfMemoryError, is_dynamo_tracing

logger = logging.getLogger(__name__)

_NEVER = -1  # no epoch


class CapturedForward(StandIn):
    """Replaces a model's own forward, and calls it whenever no CUDA graph can be replayed.

    The first call of a shape runs in Python. The second runs in Python and is then recorded. Later
    calls are replayed as long as the model is unchanged. Once the CUDA graph of one shape has
    passed all comparisons, other shapes are recorded with their first call.

    Args:
        model, forward: The host's module, and its forward until now.
        runners: The runners of its blocks.
        cuda_graphs: Holds the CUDA graphs.
        trusted: What its modules may be.
        share: Which part of a larger model's forward it is, above 0 and up to 1.
        without_graphs: A context in which the model runs as without this package, for when it does
            not fit in another way.
        is_private: As for `ModelTracker`.

    Attributes:
        model, eager: As given; `eager` is the forward.
        active: False lets every call through.
        variant, keeps: Of the `ForwardVariant` of the next call; set between calls. The model may
            consist of other modules in each variant.
        reason: Why sizes like the last call's are not replayed, or "".
        replayed: Whether the last call was replayed and needed no comparison.
        replayed_from: The CUDA graph of the last call, if that was so. While calls are replayed
            from one CUDA graph, nothing of the model has changed but the numbers in its weights.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        runners: Sequence[BlockRunner],
        cuda_graphs: CudaGraphCache,
        trusted: TrustedModules,
        share: float = 1.0,
        without_graphs: Callable[[], AbstractContextManager[None]] | None = None,
        is_private: bool = False,
    ) -> None:
        self.model, self.eager, self._runners = model, forward, runners
        self._cuda_graphs, self._share = cuda_graphs, share
        self._tracker = ModelTracker(model, runners, trusted, is_private)
        self._policy, self._gain, self._checks = RecordingPolicy(), RecordingGain(), ReplayChecks()
        self._recorder = ForwardRecorder(model, forward, runners, self._tracker, trusted.rules)
        self._without_graphs = without_graphs
        self._short_in: int | None = _NEVER
        eager = None if without_graphs is None else self._short_of_memory
        self._within_memory = OomFallback(
            forward, cuda_graphs, self._retry, eager, partial(scales_of_call, model, trusted.rules)
        )
        self.active = True
        self.variant: Hashable = None
        self.keeps: Sequence[KeptTensors] = ()
        self.reason, self.replayed, self._records = "", False, True
        self._replayed_from: weakref.ref[CapturedGraph] | None = None

    @property
    def replayed_from(self) -> CapturedGraph | None:
        """See the class."""
        return None if self._replayed_from is None else self._replayed_from()

    def goes_on_with(self, forward: Callable[..., Any]) -> bool:
        """Whether this forward, with its CUDA graphs, serves after another installation.

        Args:
            forward: What runs as the model's forward now, from `forward_of`.
        """
        if self.eager != forward:
            return False
        if isinstance(self.eager, ClassForward) and self.eager is not forward:
            self.eager.follow()
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.eager, memo)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return self.eager(*args, **kwargs)
        if isinstance(self.eager, ClassForward):
            self.eager.keep_if_taken(self)
        self.replayed, self._replayed_from = False, None
        if not self.active:
            return self.eager(*args, **kwargs)
        if self._without_graphs is not None and self._short_in == epoch_of(self._runners):
            with self._without_graphs():
                return self.eager(*args, **kwargs)
        call = read_call(args, kwargs)
        if isinstance(call, str) or (reason := self._cuda_graphs.unavailable_reason(call.device)):
            self.reason = call if isinstance(call, str) else str(reason)
            return self._within_memory(*args, **kwargs)
        key, form = (id(self.model), self.variant, call.key), (self.variant, call.form)
        with self._cuda_graphs.lock, self._cuda_graphs.order.after_the_last(call.device):
            captured = self._cuda_graphs.find(key)
            if captured is not None and not self._checks.waits(captured, epoch_of(self._runners)):
                replayed = self._try_replay(key, form, call, captured)
                if replayed is not None:
                    run = partial(self._within_memory, *args, **kwargs)
                    return self._checked(key, form, call, captured, replayed[0], run)
            captured = None  # releases the text KV graphs and all else that it owned
            compared, stop = self._tracker.comparisons(), self._cuda_graphs.stopwatch(call.device)
            output = self._within_memory(*args, **kwargs)
            try:
                if compared == self._tracker.comparisons():
                    self._gain.note_python(key, stop())
                self._after_python(key, form, call, output, compared)
            except Exception as exc:  # the output is there: nothing may end the image
                self._distrust(key, exc)
            return output

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Make no CUDA graph of calls within the ``with`` block, since none like them will come."""
        self._records = False
        try:
            yield
        finally:
            self._records = True

    def forget(self) -> None:
        """Drop this model's CUDA graphs."""
        with self._cuda_graphs.lock:
            self._cuda_graphs.drop_model(id(self.model))
            self._policy.forget()
            self._gain.forget()
            self._checks.forget()
            self._tracker.forget()

    def _after_python(
        self, key: Hashable, form: Hashable, call: ForwardCall, output: Any, compared: int
    ) -> None:
        """Record a forward that just ran in Python, if that is due.

        Args:
            key, form: Of the call.
            call: Its arguments.
            output: What the forward returned.
            compared: `ModelTracker.comparisons` before it.
        """
        self._tracker.note_derived(form)
        kept = self._cuda_graphs.find(key)
        if kept is not None:
            # It waits, or its derived weights were out of date and are right again.
            waits = self._checks.waits(kept, epoch_of(self._runners))
            self.reason = UNDECIDED if waits else ""
        elif compared == self._tracker.comparisons():
            self._consider_recording(key, form, call, output)
        else:  # blocks that were compared returned eager's result, which a replay would not
            self._policy.note_seen(key)
            self.reason = "new graphs are being compared with eager"

    def _distrust(self, key: Hashable, exc: Exception) -> None:
        """Run a size without a CUDA graph after an error while the model was looked at."""
        logger.warning("%s cannot be looked at", type(self.model).__name__, exc_info=True)
        self._cuda_graphs.drop(key, "the model cannot be looked at")
        self._refuse(key, f"it cannot be looked at: {type(exc).__name__}: {exc}")

    # ------------------------------------------------------------------ replaying

    def _try_replay(
        self, key: Hashable, form: Hashable, call: ForwardCall, captured: CapturedGraph
    ) -> tuple[Any] | None:
        """As `_replay`; an error while the model is looked at runs the forward in Python."""
        try:
            return self._replay(key, form, call, captured)
        except OutOfMemoryError:
            raise
        except Exception as exc:
            self._distrust(key, exc)
            return None

    def _replay(
        self, key: Hashable, form: Hashable, call: ForwardCall, captured: CapturedGraph
    ) -> tuple[Any] | None:
        """The output of a replay, or None if the forward has to run in Python.

        The replay is launched before the model is checked for changes, so that both overlap. This
        is safe because everything that the replay reads is kept alive by the CUDA graph, or still
        lies in its place. Work launched after a replay waits until the driver has launched all of
        the replay.
        """
        if captured.state.snapshot.weights_lie_where_they_did():
            is_timed = captured.replays == 1
            stop = self._cuda_graphs.stopwatch(call.device) if is_timed else None
            captured.fill(call.tensors)
            captured.recording.replay()
            self._gain.note_replay(key, stop() if stop else None)
            if self._tracker.is_still(captured.state):
                if not self._tracker.has_current_derived_weights(form, captured.state):
                    return None  # the forward makes them again, in the same places
                if self._tracker.derived_places() == captured.derived_places:
                    # A copy, since the next replay of any CUDA graph overwrites it.
                    output = captured.recording.output
                    return (pytree.tree_map_only(torch.Tensor, torch.clone, output),)
        else:
            # CUDA graphs of these weights keep alive what nobody else reads any more.
            self._cuda_graphs.drop_snapshot(
                captured.state.snapshot, "the model's weights have moved"
            )
        # New block graphs are no waste: there is a last one.
        if self._tracker.has_graphs_of(captured.state):
            self._policy.note_dropped(captured.replays)
        self._cuda_graphs.drop(key, "the model has changed")
        self._policy.note_seen(key)
        return None

    # ------------------------------------------------------------------ comparing

    def _checked(
        self,
        key: Hashable,
        form: Hashable,
        call: ForwardCall,
        captured: CapturedGraph,
        output: Any,
        run: Callable[[], Any],
    ) -> Any:
        """A replay's output, or the forward's own while the CUDA graph is being compared."""
        captured.replays += 1
        self._policy.note_replays(captured.replays)
        spot_checks = self._cuda_graphs.spot_checks
        if self._checks.is_done(captured):
            self.reason, self.replayed = "", True
            self._replayed_from = weakref.ref(captured)
            if spot_checks.chosen is None or spot_checks.chosen not in self._runners:
                call.containers.apply(captured.argument_changes)
                return output
            with spot_checks.comparing():
                expected = run()
                self._check(key, captured, output, expected, in_use=True)
            return expected
        expected = run()
        self._check(key, captured, output, expected)
        self._checks.note_passed(form, captured)
        return expected

    def _check(
        self,
        key: Hashable,
        captured: CapturedGraph,
        output: Any,
        expected: Any,
        *,
        in_use: bool = False,
    ) -> None:
        """Compare a replay with eager, and drop a CUDA graph that is wrong."""
        try:
            problem = self._checks.check(captured, output, expected, epoch_of(self._runners))
        except OutOfMemoryError:  # which must not cost the image
            self._give_up(key)
            return
        if problem is None:
            return
        self._cuda_graphs.drop(key, f"a replay {problem}")
        self._refuse(key, f"a replay {problem}")
        if in_use:
            self._cuda_graphs.found_wrong(type(self.model).__name__, self.reason)

    # ------------------------------------------------------------------ recording

    def _consider_recording(
        self, key: Hashable, form: Hashable, call: ForwardCall, output: Any
    ) -> None:
        """Record this shape if it has run before and nothing speaks against it."""
        if not self._records:
            self.reason = "forwards like this one run once"
            return
        epoch = epoch_of(self._runners)
        refused = self._policy.refusal_reason(
            key, epoch, lambda: self._tracker.snapshot(self.variant).origin
        )
        if refused is not None:
            self.reason = refused
            return
        if not self._policy.has_seen(key) and not self._checks.knows(form):
            self._note_new(key)
            return
        reason = self._gain.still_refused_reason(key, epoch)
        reason = reason or self._policy.pause_reason() or self._tracker.refusal_reason(self.variant)
        if reason is not None:
            self.reason = reason
            return
        if call.containers.changes() is None:
            self._refuse(key, "it puts new tensors into lists or dictionaries of its call")
            return
        self.reason = ""
        frozen = self._tracker.frozen(self.variant)
        if frozen.snapshot.refusal_reason is not None:  # the model has changed a moment ago
            self.reason = frozen.snapshot.refusal_reason
            return
        if frozen.snapshot.streamed_storages(call.device) is None:
            self.reason = "part of the weights is on another device (offloading)"
            return
        if not self._policy.has_seen(key) and not self._checks.has_passed(form, frozen):
            self._note_new(key)
            return
        self.reason = self._gain.refused_reason(key, epoch, frozen.snapshot) or ""
        if self.reason:
            return
        stop = self._cuda_graphs.stopwatch(call.device)
        captured = self._record(key, call, output, frozen)
        if captured is None:
            return
        self._checks.begin(form, captured)
        captured.fill(call.tensors)
        captured.recording.replay()
        self._check(key, captured, captured.recording.output, output)
        self._gain.note_recording(key, stop())

    def _record(
        self, key: Hashable, call: ForwardCall, output: Any, frozen: FrozenState
    ) -> CapturedGraph | None:
        """Record a forward; None if that failed, with the cause in `reason`."""

        def make(recorder: Recorder) -> CapturedGraph:
            buffers = self._cuda_graphs.static_buffers
            made = self._recorder.record(recorder, buffers, call, output, frozen, self.variant)
            made.keeps, made.share = self.keeps, self._share
            made.argument_changes = call.containers.changes() or ()
            return made

        try:
            return self._cuda_graphs.record(key, make, call.device, self._share)
        except ModelChangedError as exc:
            self.reason = exc.message
        except CaptureError as exc:
            if isinstance(exc.__cause__, ModelChangedError):
                self.reason = exc.__cause__.message
            else:
                self._refuse(key, f"cannot be recorded: {exc.message}", frozen.snapshot.origin)
        except OutOfMemoryError:
            self._give_up(key)
        return None

    def _note_new(self, key: Hashable) -> None:
        self._policy.note_seen(key)
        self.reason = "this size is new"

    def _give_up(self, key: Hashable) -> None:
        self._cuda_graphs.drop_all("memory is short")
        self._refuse(key, "no memory for a CUDA graph of this size")

    def _refuse(self, key: Hashable, reason: str, origin: object = None) -> None:
        self._policy.refuse(key, reason, origin, epoch_of(self._runners))
        self.reason = reason
        logger.info("%s runs without a CUDA graph: %s", type(self.model).__name__, reason)

    @contextmanager
    def _short_of_memory(self) -> Iterator[None]:
        """Run without graphs, also for the rest of this picture: each attempt takes time."""
        assert self._without_graphs is not None
        self._short_in, self.reason = epoch_of(self._runners), "memory is short"
        with self._without_graphs():
            yield

    def _retry(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Retry:
        try:
            return retry_of(self._tracker.snapshot(self.variant), args, kwargs)
        except Exception:  # the error that counts is that memory ran out
            logger.warning("%s cannot be looked at", type(self.model).__name__, exc_info=True)
            return Retry.NOT
