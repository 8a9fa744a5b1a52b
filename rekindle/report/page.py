"""Turns a template into one HTML file that needs nothing else and may load nothing else.

Style and script are written into the page and named in its Content-Security-Policy by
their hashes; everything remote, every other script and every inline style is forbidden by
it (inline styles are allowed where a page frames a document that a step wrote). Values
are escaped by jinja2's autoescape.

A card shows text from users' data, and is opened from disk, offline, on a phone, in dark
mode or printed, years later, and passed on by mail. So its pictures are inline SVG drawn
by about 500 lines of ours (plots.py, heatmap.py). Rejected: plotly, which is megabytes in
every card; matplotlib, whose colours are fixed when drawn; charts from a CDN;
`unsafe-inline`; a sanitizer, which is a list of what its author thought of. The cost:
every new kind of plot is ours to write and test, and there are no style attributes."""

import base64
import functools
import hashlib
import math
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rekindle import formats
from rekindle.report import drawing, texts, verdicts

_TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """The page as text that UTF-8 can hold, without credentials."""
    page = _environment().get_template(template).render(**values)
    # a lone surrogate, as undecodable names of files have, is no UTF-8
    return texts.without_credentials(page).encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment of the templates: what they may name,
    and how they write numbers."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    environment.globals.update(
        style=Markup(style),  # noqa: S704 - a file of ours
        script=Markup(script),  # noqa: S704 - a file of ours
        policy=_policy(f"'{_hash(style)}'", script),
        # frames take over the page's policy, and documents of others have styles of their
        # own
        foreign_policy=_policy("'unsafe-inline'", script),
        foreign=False,
        improvement=verdicts.improvement,
        Axis=drawing.Axis,
    )
    environment.filters.update(
        metric=formats.metric,
        signed=formats.signed,
        count=formats.count,
        percent=formats.percent,
        share=formats.share,
        size=formats.size,
        duration=formats.duration,
        date=formats.date,
        window=formats.window,
        metric_name=texts.metric_name,
        shorten=texts.shorten,
        shorten_middle=texts.shorten_middle,
        plain=texts.plain,
        tick_text=drawing.tick_text,
    )
    environment.tests["finite"] = math.isfinite
    return environment


def _policy(styles: str, script: str) -> str:
    """A Content-Security-Policy that allows these styles, this script,
    and images in the page."""
    allowed = f"img-src data:; style-src {styles}; script-src '{_hash(script)}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    """The hash by which a policy names a style sheet or a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
