"""Turns a template into one HTML file that needs nothing else and may load nothing else.

Style and script are written into the page and named in its Content-Security-Policy by their hashes;
everything remote, every other script and every inline style is forbidden by it (inline styles are
allowed where a page frames a document that a step wrote). Values are escaped by jinja2's
autoescape."""

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
    return texts.without_credentials(page).encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    files = (_TEMPLATES / "style.css", _TEMPLATES / "page.js")
    style, script = (file.read_text(encoding="utf-8") for file in files)
    environment.globals.update(style=Markup(style), script=Markup(script))  # noqa: S704 - files of ours
    environment.globals.update(policy=_policy(f"'{_hash(style)}'", script), foreign=False)
    # frames take over the page's policy, and documents of others have styles of their own
    environment.globals.update(foreign_policy=_policy("'unsafe-inline'", script))
    shown = ("metric", "signed", "count", "percent", "share", "size", "duration", "date", "window")
    environment.filters |= {name: getattr(formats, name) for name in shown}
    words = ("metric_name", "shorten", "shorten_middle", "plain")
    environment.filters |= {name: getattr(texts, name) for name in words}
    environment.filters["tick_text"], environment.tests["finite"] = drawing.tick_text, math.isfinite
    environment.globals.update(improvement=verdicts.improvement, Axis=drawing.Axis)
    return environment


def _policy(styles: str, script: str) -> str:
    allowed = f"img-src data:; style-src {styles}; script-src '{_hash(script)}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
