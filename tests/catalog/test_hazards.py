"""Presets of how often spot machines are taken away."""

from __future__ import annotations

import datetime as dt

from rekindle.catalog.tables import presets


def test_the_four_presets_rise_from_calm_to_hostile() -> None:
    rates = {name: preset.per_node_hour for name, preset in presets().items()}
    assert rates == {"calm": 0.0004, "moderate": 0.02, "rough": 0.1, "hostile": 0.3}
    assert list(rates.values()) == sorted(rates.values())


def test_every_preset_says_what_was_measured_where_and_when_it_was_read() -> None:
    for preset in presets().values():
        assert preset.measured
        assert preset.source.startswith("https://")
        assert dt.date.fromisoformat(preset.as_of) <= dt.date(2026, 11, 23)
