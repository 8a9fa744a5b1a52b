"""A moment, and what runs of before came to, for tests of triggers."""

import datetime as dt

from rekindle.app.triggers import Past
from rekindle.data.arrivals import Arrivals
from rekindle.records import Fingerprint

NOW = dt.datetime(2026, 7, 15, 12, tzinfo=dt.UTC)
READ = Fingerprint(
    data="a", window="", files=1, bytes=1, run_key="k", work_key="w", init_from="base", champion=""
)


def ago(**length: float) -> dt.datetime:
    return NOW - dt.timedelta(**length)


def past(*began: dt.datetime, **fields: object) -> Past:
    fields = {"judged_at": (began or (ago(days=10),))[0], "read": READ, **fields}
    return Past(began or (ago(days=10),), "r1", **fields)  # type: ignore[arg-type]


def held(data: str, new: int) -> Arrivals:
    """Of 1,000 rows."""
    return Arrivals(data, "", 1000, 1000, new)
