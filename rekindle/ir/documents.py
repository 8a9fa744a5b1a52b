"""The documents in the text of a compiled pipeline, which is YAML or JSON.

JSON is read as JSON, although nearly all of it is YAML, too: to YAML 1.1 `1e-07` is text, the two
halves of an emoji are an error, and so is a tab."""

from __future__ import annotations

import json
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(text: str) -> list[Any]:
    """The documents that are not empty; yaml.YAMLError if there are none to be read."""
    if text.lstrip().startswith("{"):
        try:
            return [json.loads(text)]
        except ValueError:
            pass  # YAML may begin so, too
    return [document for document in yaml.load_all(text, _LOADER) if document is not None]
