"""SVG elements as text, escaped by construction: whatever is not `Markup` already is."""

from collections.abc import Iterable

from markupsafe import Markup, escape

# A coordinate system that stretches with its box; the style sheet keeps its strokes from scaling.
_STRETCHED = 'viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%"'


def tag(name: str, *body: str | Markup, **attributes: object) -> Markup:
    """`<name attributes>body</name>`; `css` is the class, `_` in a name `-`, floats are rounded."""
    written = Markup("")
    for key, value in attributes.items():
        called = "class" if key == "css" else key.replace("_", "-")
        if value is not None:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            written += Markup(' {}="{}"').format(called, shown)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, join(body))  # noqa: S704 - a name of ours


def join(parts: Iterable[str | Markup]) -> Markup:
    """The parts after one another, escaped where they are plain text."""
    return Markup("").join(escape(part) for part in parts)


def title(text: str) -> Markup:
    """What shows on hover and is read out."""
    return tag("title", text)


def share(place: float) -> str:
    """A position or length in per cent of the plot."""
    return f"{place:.2f}%"


def stretched(*body: Markup) -> Markup:
    """A layer of 1000 x 1000 units over the whole plot, for paths."""
    return Markup("<svg " + _STRETCHED + ">") + join(body) + Markup("</svg>")  # noqa: S704 - constants


def plot(css: str, label: str, *body: str | Markup, **attributes: object) -> Markup:
    """A whole plot, with its content in words."""
    return tag("svg", *body, css=f"plot {css}", role="img", aria_label=label, **attributes)
