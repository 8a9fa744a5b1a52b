"""The learning rate, by worked numbers and by its shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.data.order import SampleOrder
from rekindle.spec.layout import resolve
from rekindle.spec.model import TrainSpec
from rekindle.train.loop import Plan
from rekindle.train.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "warmup", "step", "rate"),
    [
        ("cosine", 0.0, 0, 1.0),
        ("cosine", 0.0, 50, 0.5),
        ("linear", 0.0, 75, 0.25),
        ("constant", 0.0, 99, 1.0),
        ("linear", 0.1, 4, 5 / 11),
        ("linear", 0.1, 10, 1.0),
        ("linear", 0.1, 55, 0.5),
    ],
)
def test_worked_numbers(schedule, warmup, step, rate):
    spec = TrainSpec(lr=1.0, lr_schedule=schedule, warmup=warmup)
    assert learning_rate(spec, step, 100) == pytest.approx(rate)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 0.9), st.integers(1, 300))
def test_it_rises_once_then_never_again_and_stays_within_its_peak(schedule, warmup, steps):
    spec = TrainSpec(lr=0.3, lr_schedule=schedule, warmup=warmup)
    rates = [learning_rate(spec, step, steps) for step in range(steps)]
    assert all(0 < rate <= 0.3 + 1e-12 for rate in rates)
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)


@pytest.mark.parametrize(
    ("fields", "rows", "steps", "micro"),
    [
        ({"epochs": 2, "global_batch_size": 64}, 100, 4, 32),
        ({"epochs": 0.5, "global_batch_size": 10}, 100, 5, 10),
        ({"steps": 7, "global_batch_size": 63}, 100, 7, 21),
        ({"global_batch_size": 128, "micro_batch_size": 64}, 1280, 30, 64),
    ],
)
def test_the_plan_counts_steps_and_micro_batches(fields, rows, steps, micro):
    train = TrainSpec.model_validate(fields)
    order = SampleOrder(rows=rows, global_batch_size=train.global_batch_size, seed=0)
    assert (Plan.of(train, order).steps, resolve(train, 1).micro_batch_size) == (steps, micro)
