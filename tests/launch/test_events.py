"""Whatever a step prints, what comes of its lines is an event that can be shown."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rekindle.app.progress import Progress
from rekindle.launch.events import MARK, parse

SHOWN = [
    {"event": "progress", "step": 3, "steps": 60},
    {"event": "progress", "step": 0.5, "steps": 6, "unit": "candidate: piece", "loss": None},
    {
        "event": "progress",
        "step": 1,
        "steps": 2,
        "loss": 1e-9,
        "samples_per_second": 3,
        "eta_seconds": 7.5,
    },
    {"event": "notice", "text": "[bold]as it is[/bold]"},
]
BROKEN = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"event": "progress"}',
    '{"event": "progress", "step": "1", "steps": 2}',
    '{"event": "progress", "step": 1, "steps": NaN}',
    '{"event": "progress", "step": 1, "steps": Infinity}',
    '{"event": "progress", "step": 1, "steps": 2, "eta_seconds": 1e300}',
    '{"event": "notice"}',
    '{"event": "notice", "text": 3}',
    '{"event": "progress", "step": 1, "steps": 2, "loss": "x"}',
    '{"event": ["progress"]}',
    '{"event": "other"}',
    '{"event": "progress", "step": ' + "9" * 5000 + ', "steps": 1}',
    "[" * 60000,
    "[" * 200000,
]


def shown(event):
    progress = Progress(Console(file=io.StringIO()))
    progress.event("train", event)


@pytest.mark.parametrize("event", SHOWN, ids=str)
def test_an_event_is_found_behind_any_prefix_and_shown(event):
    assert parse(f"[rank 0] {MARK}{json.dumps(event)}") == event
    shown(event)


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:40])
def test_what_is_no_event_is_a_line_like_others(text):
    assert parse(MARK + text) is None


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([])
NAMES = st.sampled_from(
    ["event", "step", "steps", "loss", "eta_seconds", "samples_per_second", "unit", "text"]
)


@given(st.dictionaries(NAMES, VALUES), st.sampled_from(["progress", "notice"]))
def test_no_line_of_a_step_breaks_what_people_see(fields, kind):
    event = parse(MARK + json.dumps({"event": kind, **fields}))
    if event is not None:
        shown(event)
