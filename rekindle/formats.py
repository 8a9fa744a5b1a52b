"""How numbers, times and sizes are written for people, on terminals, in errors and on the card."""

import datetime as dt
import math
from collections.abc import Collection, Sequence

from rekindle.masking import plain


def metric(value: float | None) -> str:
    """A metric or a check: four decimals, fewer where they are zeros; 0.97777 -> 0.9778."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == int(value) and abs(value) < 1e15:
        return count(int(value)) if abs(value) >= 2 else f"{value:.1f}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def fixed(value: float, sign: str = "") -> str:
    """Four decimals, of a number for which they tell something; `sign` "+": also of a gain."""
    exact = not value or 5e-5 <= abs(value) < 1e6
    return format(value, f"{sign}.4f" if exact else f"{sign}.3g")


def signed(value: float | None) -> str:
    """A difference with its sign; 0.0123 -> +0.0123."""
    text = metric(value)
    return text if value is None or not value > 0 else f"+{text}"


def count(value: float) -> str:
    """A whole number with commas between thousands; 12345 -> 12,345."""
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """A share as per cent; 0.1234 -> 12.3%."""
    return f"{share:.1%}" if math.isfinite(share) else "–"


def share(ratio: float) -> str:
    """A ratio as per cent in three digits; 1.4 -> 140%, 0.125 -> 12.5%."""
    value = 100 * ratio
    return f"{count(value) if 100 <= value < 1e6 else f'{value:.3g}'}%"


def size(value: int) -> str:
    """Bytes in decimal units; 1_797_000 -> 1.8 MB."""
    amount, unit = float(value), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def binary(value: float) -> str:
    """Memory, of which machines have powers of two; 3 * 2**30 -> 3.0 GiB."""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def usd(value: float) -> str:
    """US dollars; 1234.5 -> $1,234, 27.447 -> $27.45."""
    return f"${count(value)}" if value >= 100 else f"${value:.2f}"


def short(value: float) -> str:
    """A large number in three digits; 1_100_048_384 -> 1.1 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return count(value)


def seconds(value: float) -> str:
    """Seconds that are compared, in three digits; 0.0123 -> 12.3 ms, 30.31 -> 30.3 s."""
    if value < 0.9995:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{count(value)} s"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them; 0.42 -> 0.4 s, 200 -> 3 min 20 s, 7500 -> 2 h 5 min."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def hours(number: float) -> str:
    """Hours as a person says them; 2.5 -> 2 h 30 min."""
    return duration(3600 * number)


def instant(text: str) -> dt.datetime | None:
    """An ISO 8601 time as UTC; `None` if it is not one. A time without zone is taken as UTC."""
    try:
        moment = dt.datetime.fromisoformat(text)
        return moment.replace(tzinfo=moment.tzinfo or dt.UTC).astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return None


def date(text: str) -> str:
    """An ISO 8601 time for people; 2026-11-21T09:08:00Z -> 21 Nov 2026, 09:08 UTC."""
    moment = instant(text)
    return f"{moment.day} {moment:%b %Y, %H:%M} UTC" if moment else text


def day(time: float) -> str:
    """Seconds of the epoch as a date in UTC; 86400 -> 2 Jan 1970."""
    return date(dt.datetime.fromtimestamp(time, dt.UTC).isoformat()).partition(",")[0]


def aligned(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table; the columns in `right` end in line, the others begin so."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = (f"{{:{'>' if i in right else ''}{width}}}" for i, width in enumerate(widths))
    form = "  ".join(cells).format
    return [plain(form(*line)).rstrip() for line in lines]


def window(text: str) -> str:
    """A window of data without midnights; 2026-07-01T00:00:00/2026-08-01T12:00:00 ->
    2026-07-01/2026-08-01T12:00:00."""
    return text.replace("T00:00:00", "")
