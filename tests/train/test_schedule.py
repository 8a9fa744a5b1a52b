"""The learning rate, by worked numbers and by its shape."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.data.order import SampleOrder
from rekindle.spec.layout import resolve
from rekindle.spec.model import TrainSpec
from rekindle.train.loop import RunLength
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
        ("wsd", 0.1, 4, 5 / 11),
        ("wsd", 0.1, 10, 1.0),
        ("wsd", 0.1, 80, 1.0),
        ("wsd", 0.1, 90, 0.5),
        ("wsd", 0.1, 99, 0.05),
    ],
)
def test_worked_numbers(schedule, warmup, step, rate):
    spec = TrainSpec(lr=1.0, lr_schedule=schedule, warmup=warmup, decay=0.2)
    assert learning_rate(spec, step, 100) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [("cosine", 50, 0.55), ("linear", 75, 0.325), ("wsd", 90, 0.55), ("wsd", 5, 1.0)],
)
def test_the_rate_ends_at_its_least_share(schedule, step, rate):
    spec = TrainSpec(lr=1.0, lr_schedule=schedule, warmup=0, decay=0.2, min_lr_ratio=0.1)
    assert learning_rate(spec, step, 100) == pytest.approx(rate)


@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.floats(0, 0.9),
    st.integers(1, 300),
    st.floats(0.01, 0.1),
    st.floats(0, 1),
)
def test_it_rises_once_then_never_again_and_stays_within_its_peak(
    schedule, warmup, steps, decay, least
):
    spec = TrainSpec(lr=0.3, lr_schedule=schedule, warmup=warmup, decay=decay, min_lr_ratio=least)
    rates = [learning_rate(spec, step, steps) for step in range(steps)]
    assert all(0 < rate <= 0.3 + 1e-12 for rate in rates)
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert min(rates[top:]) >= 0.3 * least - 1e-12


@given(st.sampled_from(["linear", "cosine"]), st.integers(1, 300))
def test_without_new_settings_the_rate_has_the_bits_it_always_had(schedule, steps):
    spec = TrainSpec(lr=3e-3, lr_schedule=schedule)
    warmup = int(0.05 * steps)
    for step in range(warmup, steps):
        share = (step - warmup) / max(1, steps - warmup)
        before = {
            "linear": 3e-3 * (1 - share),
            "cosine": 3e-3 * 0.5 * (1 + math.cos(math.pi * share)),
        }
        assert learning_rate(spec, step, steps) == before[schedule]


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
    order = SampleOrder(rows=[rows], global_batch_size=train.global_batch_size, seed=0)
    assert (RunLength.of(train, order).steps, resolve(train, 1).micro_batch_size) == (steps, micro)
