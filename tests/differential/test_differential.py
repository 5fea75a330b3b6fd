"""Some hundred random steps beside an eager twin, and that known faults are found by such steps.

`python -m tests.differential` runs as many as one likes; a sequence that a failure prints is run
again with `--world W --sequence "…"`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from tests.differential import sequences
from tests.differential.grammar import Grammar
from tests.differential.mismatches import difference
from tests.differential.plants import PLANTS, PLANTS_FOR_A_GPU
from tests.differential.registry import OPERATIONS
from tests.differential.sequences import Driver, Found, Step, as_json
from tests.support import quick_builds

FIXED_SEED = 7
A_UNETS_SEED, A_TRANSFORMERS_SEED = 6, 5  # of the first sequence: a UNet's, SD3's
# A sequence for each cheap plant, as `--plant` has found and cut it down.
SHORTEST = {
    "attributes-of-layers": (7, "tiling_on:1"),
    "weights-that-moved": (7, "all_weights_move:1"),
    "writes-past-the-version-counter": (7, "lora_add:5 again:1 again:2 lora_hotswap:3"),
    "wrappers-outside-of-graphs": (7, "lora_add:5 again:1 again:2 lora_scaling_written:1"),
    "outputs-in-the-shared-pool": (7, "way:3 again:1"),
    "tensors-that-a-recording-leaves": (
        7,
        "lora_add:421208 lora_scales_are_tensors:1 steps:733280 lora_scale_of_the_call:402909",
    ),
    "exchanged-code": (7, "known_code_exchanged_on:1"),
    "code-between-blocks": (7, "patched_for_a_part_of_each_forward_on:1"),
    "prompts-by-identity": (7, "prompt_between_steps:1"),
    "halves-of-what-depends-on-each-other": (
        7,
        "no_memory_for_batches_on:1 images_see_each_other_on:1",
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def report(found: Found | None) -> str:
    """The command that repeats a failure."""
    if found is None:
        return ""
    steps = " ".join(map(str, found.steps))
    return f'{found.mismatch}\n  --world {found.world} --sequence "{steps}"'


@pytest.mark.parametrize("seed", [A_UNETS_SEED, A_TRANSFORMERS_SEED])
def test_no_picture_is_wrong(seed: int) -> None:
    driver = Driver()
    found = next(driver.random_run(seed, 100, seconds=80), None)
    if found is not None:
        found = driver.shortest(found, 30)
    assert found is None, f"--seed {seed}\n{report(found)}"
    assert driver.counts.steps > 10
    assert driver.counts.replays > 10
    assert driver.counts.graph_calls > 100


@pytest.mark.parametrize("plant", sorted(SHORTEST))
def test_a_planted_fault_is_found(plant: str) -> None:
    world, text = SHORTEST[plant]
    steps = [Step.parse(each) for each in text.split()]
    assert Driver(plant=plant, model="sd15").run(world, steps) is not None
    found = Driver(model="sd15").run(world, steps)
    assert found is None, report(found)


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_what_a_plant_takes_away_is_there(plant: str) -> None:
    with PLANTS[plant]():
        pass


def test_operations_change_both_alike() -> None:
    """Two eager pipelines: whatever differs is an operation's own fault."""
    driver = Driver(compiled=False)
    found = next(driver.random_run(FIXED_SEED, 40, seconds=10), None)
    assert found is None, report(found)


# They change nothing that is drawn, or only where the model has something to change.
WITHOUT_EFFECT = {
    *("training_mode", "marker", "torch_flags", "chunked_feed_forward", "qkv_fused", "offloaded"),
}


@pytest.mark.parametrize("model", ["sdxl", "flux", "qwen_image"])
def test_features_change_the_picture(model: str) -> None:
    """Or else nothing is tested: DeepCache reuses nothing in less than ten steps."""
    idle, driver = set(), Driver(compiled=False, model=model)
    with driver._world(5) as (world, _):
        plain = world._outcome(world.twin)
        for name in [name.removesuffix("_off") for name in OPERATIONS if name.endswith("_off")]:
            on = OPERATIONS.get(f"{name}_on")
            if name == "lora" or on is None or not on.fits(world):
                continue
            picture = replace(world.picture)
            on.apply(world, Random(1))
            changed = world._outcome(world.twin)
            OPERATIONS[f"{name}_off"].apply(world, Random(1))
            assert isinstance(changed, torch.Tensor), (name, changed)
            world.picture = picture
            if changed.equal(plain):
                idle.add(name)
    assert idle <= WITHOUT_EFFECT


def test_one_feature_at_a_time_sets_processors() -> None:
    """Each puts back what it found, in any order."""
    names = [name.removesuffix("_on") for name in OPERATIONS if name.endswith("_on")]
    names = [name for name in names if f"{name}_off" in OPERATIONS]

    def switch(name: str, state: str) -> None:
        OPERATIONS[f"{name}_{state}"].apply(world, Random(1))

    def processors() -> list[object]:
        return [vars(module).get("processor") for module in world.twin_denoiser.modules()]

    with Driver(compiled=False, model="sd15")._world(5) as (world, _):
        setters = []
        for name in names:
            before = processors()
            if OPERATIONS[f"{name}_on"].fits(world):
                switch(name, "on")
                if [p for p in processors() if p is not None] != [p for p in before if p]:
                    setters.append(name)
                switch(name, "off")
        assert len(setters) > 5
        for name in setters:
            switch(name, "on")
            assert not [other for other in setters if OPERATIONS[f"{other}_on"].fits(world)], name
            switch(name, "off")


def test_there_are_enough_kinds_of_operation_and_of_plant() -> None:
    assert len(OPERATIONS) >= 60
    assert len(PLANTS.keys() - set(PLANTS_FOR_A_GPU)) >= 8


def test_what_often_comes_next_exists() -> None:
    for operation in OPERATIONS.values():
        assert set(operation.then) <= OPERATIONS.keys(), operation.name


def test_operations_that_show_a_fault_together_meet() -> None:
    """By chance these two would meet once in some thousand steps."""
    pairs = Counter[tuple[str, str]]()
    with Driver(model="sd15")._world(5) as (world, _):
        for seed in range(240):
            grammar, drawn = Grammar(Random(seed), Counter(OPERATIONS.keys())), list[str]()
            world.has_replayed = True
            while len(drawn) < 20:  # none is carried out, so all that fits now goes on fitting
                drawn.append(grammar.next(world).name)
            pairs.update(itertools.pairwise(drawn))
    assert pairs["no_memory_for_batches_on", "images_see_each_other_on"] > 12
    assert pairs["prompt", "prompt_in_place"] + pairs["prompt", "prompt_between_steps"] > 12


def test_a_loaded_lora_is_often_changed_while_it_is_replayed() -> None:
    """Of 172 operations, few are a LoRA's; the strength of one that is replayed has to change."""
    changed = Counter[str]()
    with Driver(model="sd15", compiled=False)._world(5) as (world, _):
        OPERATIONS["lora_add"].apply(world, Random(1))
        world.has_replayed = True
        for seed in range(60):
            grammar = Grammar(Random(seed), Counter(OPERATIONS.keys()))
            changed.update(grammar.next(world).name for _ in range(10))
    assert changed["lora_weights"] + changed["lora_scaling_written"] > 50


def test_each_operation_that_fits_comes_soon() -> None:
    """A fault that one operation shows has to be found within 500 steps."""
    with Driver(model="sd15", compiled=False)._world(5) as (world, _):
        world.has_replayed = True
        fitting = {op.name for op in OPERATIONS.values() if op.fits(world) and not op.restores}
        done = Counter[str]()
        while done.total() < 240:
            grammar = Grammar(Random(done.total()), done)
            for _ in range(20):
                done[grammar.next(world).name] += 1
    assert len(fitting) > 80
    assert fitting <= done.keys()


def test_a_seed_always_draws_the_same_steps() -> None:
    drawn = []
    for _ in range(2):
        driver = Driver(compiled=False)
        assert next(driver.random_run(3, 15), None) is None
        drawn.append(driver.counts.operations)
    assert drawn[0] == drawn[1]


def test_both_runs_of_a_planted_sequence_begin_with_the_same_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first run makes more, with which the second would draw through other graphs."""
    monkeypatch.setattr(quick_builds, "_BUILT", {})
    starts, real = list[int](), sequences.stand_ins

    def seen(device: str, programs: Mapping[str, bytes] | None = None) -> Any:
        starts.append(-1 if programs is None else len(programs))
        return real(device, programs)

    monkeypatch.setattr(sequences, "stand_ins", seen)
    driver = Driver(plant="attributes-of-layers", model="sd15")
    world, fault = SHORTEST["attributes-of-layers"]
    found = driver.run(world, [Step.parse(fault)])
    assert found is not None
    assert len(quick_builds._BUILT) > 0
    assert driver.is_planted(found)
    driver.shortest(found, 1)
    assert starts[:2] == [0, 0]
    assert set(starts) == {0}


def test_a_sequence_is_cut_down_to_what_shows_the_fault() -> None:
    driver = Driver(plant="attributes-of-layers", model="sd15")
    world, fault = SHORTEST["attributes-of-layers"]
    found = driver.run(world, [Step.parse(t) for t in f"size:1 noise:2 {fault} again:1".split()])
    assert found is not None
    assert [str(step) for step in driver.shortest(found, 60).steps] == [fault]


def test_what_counts_as_a_difference() -> None:
    x, nan = torch.ones(4), torch.full((4,), torch.nan)
    assert difference(x, x, 1e-5) is None
    assert difference(nan, nan, 1e-5) is None
    for ours, theirs in ((nan, x), (x, nan), (x[:2], x), (x * 1.001, x)):
        assert difference(ours, theirs, 1e-5) is not None
    error, other = RuntimeError("a"), ValueError("b")
    assert difference(error, RuntimeError("c"), 1e-5) is None
    for ours, theirs in ((error, x), (x, error), (error, other)):
        assert difference(ours, theirs, 1e-5) is not None


def test_a_report_has_what_the_issue_asks_for() -> None:
    driver = Driver()
    found = driver.run(5, [Step.parse("noise:1")])
    made = as_json(driver.counts, [] if found is None else [found], seed=5)
    assert {"steps", "operations", "graph_calls", "replays", "mismatches"} <= made.keys()
    assert made["operations"] == {"noise": 1}
