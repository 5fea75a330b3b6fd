"""When recording is paused because it does not pay, and when it goes on."""

from __future__ import annotations

from onediff_ext.engine.cuda_graphs.recording_policy import RecordingPolicy


def calls_until_recording(policy: RecordingPolicy) -> int:
    """How many calls in a row are refused."""
    calls = 0
    while policy.pause_reason() is not None:
        calls += 1
        assert calls < 10_000
    return calls


def waste(policy: RecordingPolicy, count: int) -> None:
    for _ in range(count):
        policy.note_dropped(replays=2)


def test_a_few_cuda_graphs_may_be_wasted() -> None:
    policy = RecordingPolicy()
    waste(policy, 3)
    assert calls_until_recording(policy) == 0


def test_each_pause_is_twice_as_long_as_the_one_before() -> None:
    policy = RecordingPolicy()
    waste(policy, 4)
    assert calls_until_recording(policy) == 31
    pauses = []
    for _ in range(3):
        waste(policy, 1)
        pauses.append(calls_until_recording(policy))
    assert pauses == [63, 127, 255]


def test_a_cuda_graph_that_pays_ends_the_row() -> None:
    policy = RecordingPolicy()
    waste(policy, 4)
    calls_until_recording(policy)
    policy.note_replays(3)
    waste(policy, 3)
    assert calls_until_recording(policy) == 0
    waste(policy, 1)
    assert calls_until_recording(policy) == 31


def test_one_that_was_dropped_after_it_had_paid_is_no_waste() -> None:
    policy = RecordingPolicy()
    for _ in range(9):
        policy.note_dropped(replays=3)
    assert policy.pause_reason() is None


def test_sizes_that_were_seen_or_refused_are_forgotten_together() -> None:
    policy = RecordingPolicy()
    policy.note_seen("a")
    policy.refuse("b", "no memory")
    assert policy.has_seen("a")
    assert policy.refusal_reason("b", 1, object) == "no memory"
    policy.forget()
    assert not policy.has_seen("a")
    assert policy.refusal_reason("b", 1, object) is None


def test_a_model_that_could_not_be_recorded_is_looked_at_once_in_an_epoch() -> None:
    policy, looked = RecordingPolicy(), []
    models = {"first": object(), "second": object()}

    def origin_now() -> object:
        looked.append(model)
        return models[model]

    model = "first"
    policy.refuse("a", "an operator waits", models[model], epoch=1)
    reasons = [policy.refusal_reason("a", epoch, origin_now) for epoch in (1, 1, 2, 2)]
    assert reasons == ["an operator waits"] * 4
    assert looked == ["first"]
    model = "second"
    assert policy.refusal_reason("a", 2, origin_now) == "an operator waits"
    assert policy.refusal_reason("a", 3, origin_now) is None
    assert policy.refusal_reason("a", 3, origin_now) is None
    assert looked == ["first", "second"]


def test_without_an_epoch_the_model_is_looked_at_in_each_call() -> None:
    policy, model = RecordingPolicy(), object()
    policy.refuse("a", "an operator waits", model)
    assert policy.refusal_reason("a", None, lambda: model) == "an operator waits"
    assert policy.refusal_reason("a", None, object) is None


def test_a_size_whose_recordings_fail_with_every_model_is_refused_for_good() -> None:
    policy, attempts = RecordingPolicy(), 0
    for epoch in range(10):
        if policy.refusal_reason("a", epoch, object) is None:
            attempts += 1
            policy.refuse("a", "an operator waits", object(), epoch)
    assert attempts == 4
