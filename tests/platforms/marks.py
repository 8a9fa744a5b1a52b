"""What submissions of tests carry."""

from __future__ import annotations

from rekindle.platforms.submission import RunTag


def mark(token: str) -> RunTag:
    """The mark of some run's submission."""
    return RunTag("digits-20261122-201005-ab12", "0123456789abcdef", token)
