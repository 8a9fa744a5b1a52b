"""What tests share with plan/test_plan.py."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
