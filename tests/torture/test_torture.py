"""A few rounds of the crash test with a fixed seed; `make torture` goes on for as long as you like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.__main__ import table, torture


@pytest.fixture(autouse=True)
def _runs_with_a_process_of_their_own_that_has_imported_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is to be killed, too."""
    monkeypatch.delenv("REKINDLE_PRELOADED", raising=False)


@pytest.mark.slow
def test_some_seconds_of_accidents_change_no_result(tmp_path: Path) -> None:
    counts = torture(tmp_path, seed=13, seconds=60, rounds=3, only="light")
    assert not counts["failures"], "see above"
    assert counts["rounds"] == 3
    assert len(counts.recoveries) == 3
    assert "seconds to recover" in table(counts)


@pytest.mark.slow
def test_a_minute_of_accidents_to_trainings_changes_no_result(tmp_path: Path) -> None:
    counts = torture(tmp_path, seed=11, seconds=60, only="heavy")
    assert not counts["failures"], "see above"
    assert counts["rounds"]
