"""How well colours are told apart, by WCAG 2.2."""

from __future__ import annotations

import re


def luminance(colour: str) -> float:
    """Relative luminance of an opaque CSS colour: `#rrggbb`, or `rgb(r, g, b)`."""
    if colour.startswith("#"):
        parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    else:
        parts = [int(float(number)) for number in re.findall(r"[\d.]+", colour)[:3]]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (p / 255 for p in parts)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1 to 21; black on white has 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
