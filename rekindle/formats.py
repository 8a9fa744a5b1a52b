"""How numbers, times and sizes are written for people, on terminals, in errors and on the card."""

import datetime as dt
import math
from collections.abc import Collection, Sequence

from rekindle.masking import plain


def metric(value: float | None) -> str:
    """A metric or a check: four decimals, fewer where they are zeros; 0.97777 -> 0.9778."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    is_whole = value == int(value) and abs(value) < 1e15
    if is_whole and abs(value) >= 2:
        return count(int(value))
    if is_whole:  # -1, 0 and 1 are the ends of shares and correlations, not counts
        return f"{value:.1f}"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.3g}"


def fixed(value: float, sign: str = "") -> str:
    """Four decimals, of a number for which they tell something; `sign` "+": also of a gain."""
    if value == 0 or 5e-5 <= abs(value) < 1e6:
        return format(value, f"{sign}.4f")
    return format(value, f"{sign}.3g")


def signed(value: float | None) -> str:
    """A difference with its sign; 0.0123 -> +0.0123."""
    text = metric(value)
    if value is not None and value > 0:
        return f"+{text}"
    return text


def count(value: float) -> str:
    """A whole number with commas between thousands; 12345 -> 12,345."""
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """A share as per cent; 0.1234 -> 12.3%."""
    return f"{share:.1%}" if math.isfinite(share) else "–"


def share(ratio: float) -> str:
    """A ratio as per cent in three digits; 1.4 -> 140%, 0.125 -> 12.5%."""
    value = 100 * ratio
    if 100 <= value < 1e6:
        return f"{count(value)}%"
    return f"{value:.3g}%"


def size(value: int) -> str:
    """Bytes in decimal units; 1_797_000 -> 1.8 MB."""
    amount = float(value)
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if amount < 1000:
            break
        amount /= 1000
        unit = larger
    if unit == "B" or amount >= 100:
        return f"{amount:.0f} {unit}"
    return f"{amount:.1f} {unit}"


def binary(value: float) -> str:
    """Memory, of which machines have powers of two; 3 * 2**30 -> 3.0 GiB."""
    if value >= 2**30:
        return f"{value / 2**30:.1f} GiB"
    return f"{value / 2**20:.1f} MiB"


def usd(value: float) -> str:
    """US dollars; 1234.5 -> $1,234, 27.447 -> $27.45."""
    if value >= 100:
        return f"${count(value)}"
    return f"${value:.2f}"


def short(value: float) -> str:
    """A large number in three digits; 1_100_048_384 -> 1.1 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return count(value)


def seconds(value: float) -> str:
    """Seconds that are compared, in three digits; 0.0123 -> 12.3 ms, 30.31 -> 30.3 s."""
    if value < 0.9995:  # what three digits would round to 1 s is written as such
        return f"{1e3 * value:.3g} ms"
    if value < 1000:
        return f"{value:.3g} s"
    return f"{count(value)} s"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them; 0.42 -> 0.4 s, 200 -> 3 min 20 s, 7500 -> 2 h 5 min."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 9.95:  # from here on one decimal would round to 10.0
        return f"{max(seconds, 0):.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        minutes, odd_seconds = divmod(whole_seconds, 60)
        return f"{minutes} min {odd_seconds} s" if odd_seconds else f"{minutes} min"
    whole_minutes = round(seconds / 60)
    if whole_minutes < 48 * 60:
        hours, odd_minutes = divmod(whole_minutes, 60)
        return f"{hours} h {odd_minutes} min" if odd_minutes else f"{hours} h"
    days, odd_minutes = divmod(whole_minutes, 24 * 60)
    return f"{days} d {odd_minutes // 60} h"


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
    written_lines = []
    for line in lines:
        cells = []
        for index, (cell, width) in enumerate(zip(line, widths, strict=True)):
            cells.append(cell.rjust(width) if index in right else cell.ljust(width))
        written_lines.append(plain("  ".join(cells)).rstrip())
    return written_lines


def window(text: str) -> str:
    """A window of data without midnights.

    2026-07-01T00:00:00/2026-08-01T12:00:00 -> 2026-07-01/2026-08-01T12:00:00."""
    return text.replace("T00:00:00", "")
