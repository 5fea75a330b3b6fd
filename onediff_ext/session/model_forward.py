"""What stands in place of a model's forward while a component serves the model."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from onediff_ext.engine.class_methods import ClassForward, forward_slot
from onediff_ext.engine.cuda_graphs.captured_forward import CapturedForward
from onediff_ext.engine.forward_variants import variant_of
from onediff_ext.engine.running.fp16_accumulation import accumulation
from onediff_ext.engine.stand_in import StandIn
from onediff_ext.engine.torch_compile import compiled_modules
from onediff_ext.engine.torch_versions import is_dynamo_tracing
from onediff_ext.engine.validity.foreign_code import transform_reason

if TYPE_CHECKING:
    from onediff_ext.engine.prompt_work import PromptWork
    from onediff_ext.session.model_component import Component

_PROMPT_IS_DONE = "the prompt's part is done"  # a variant of the forward


class ModelForward(StandIn):
    """A model's forward that builds missing graphs after its result is computed.

    So a forward never switches from eager to graphs halfway.

    Args:
        eager: The model's own forward.
        component: The model's component.

    Attributes:
        eager: As given.
        captured: The forward as a CUDA graph, or None.
        prompt_work: Does the prompt's part of a forward ahead of it; None where nothing is known.
    """

    def __init__(self, eager: Callable[..., Any], component: Component) -> None:
        self.eager, self._session = eager, component.session
        # Hosts may keep this after the component is removed, and call it.
        self._component = weakref.ref(component)
        self._forward = eager
        self.captured: CapturedForward | None = None
        self.prompt_work: PromptWork | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.eager, memo)

    def use(self, forward: Callable[..., Any]) -> None:
        """Compute results with another callable from now on.

        Args:
            forward: The callable; it takes the same arguments as the model.
        """
        self._forward = forward
        self.captured = forward if isinstance(forward, CapturedForward) else None

    def show_class(self) -> None:
        """As `ClassMethod.show`."""
        if isinstance(self.eager, ClassForward):
            self.eager.show()

    @property
    def component(self) -> Component | None:
        """The component, while it exists."""
        return self._component()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_tracing():
            return self.eager(*args, **kwargs)
        session, component = self._session, self._component()
        if isinstance(self.eager, ClassForward):
            self.eager.keep_if_taken(self)
        runners = [] if component is None else component.runners
        parallel = None if component is None else component.cfg_parallel
        call = None
        # The tensors of a transform last no longer than it, so no later call is compared with them.
        if component is not None and transform_reason() is None:
            call = partial(component.call_of, args, kwargs)
        if component is not None:
            component.follow_class()
        with (
            session.forward(call),
            session.spot_checks.forward(
                [*runners, *([] if parallel is None else parallel.runners)]
            ),
            accumulation(session.precision),
        ):
            first = component if component is not None and session.drew(component) else None
            if first is not None:
                first.foreign_blocks.before_picture(runners, compiled_modules(first.model))
            if component is not None and component.role.is_vae:
                session.memory.give_back()
            output = self._timed(component, args, kwargs)
            session.contents.settle()
        if first is not None:
            replayed = first.captured is not None and first.captured.replayed
            first.foreign_blocks.after_first_forward(runners, replayed=replayed)
        self._session.after_forward()
        return output

    def _timed(
        self, component: Component | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward; a denoiser's time counts for the estimate of what graphs save."""
        if component is None or not component.role.is_denoiser:
            return self._forward(*args, **kwargs)
        with self._session.timer.forward((*args, *kwargs.values())):
            if component.cfg_parallel is None:
                return self.compute(args, kwargs)
            return component.cfg_parallel(self.compute, args, kwargs)

    def compute(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the forward on this model's own device.

        Args:
            args, kwargs: Of the call.

        Returns:
            The output of the forward.
        """
        captured = self.captured
        if captured is None:
            return self._forward(*args, **kwargs)
        told = variant_of(captured.model)
        if told is not None:
            captured.variant, captured.keeps = told.variant, told.keeps
        try:
            if told is not None or self.prompt_work is None:
                output = captured(*args, **kwargs)
                if told is not None and captured.replayed:
                    told.note_replay()
                return output
            run = partial(_run, captured)
            return self.prompt_work(run, captured.unrecorded, self.eager, args, kwargs)
        finally:
            captured.variant, captured.keeps = None, ()


def _run(
    captured: CapturedForward,
    prompt_is_done: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a forward; with its prompt's part done it is another one for CUDA graphs."""
    captured.variant = _PROMPT_IS_DONE if prompt_is_done else None
    return captured(*args, **kwargs)


def serving(model: nn.Module) -> Component | None:
    """Return the component that has replaced the model's forward, or None.

    Args:
        model: A model of a host, compiled or not.
    """
    forward = vars(model).get(forward_slot(model))
    return forward.component if isinstance(forward, ModelForward) else None
