"""Kinds of input: what an example's content is, how it is read, kept, asked and watched.

`base` has the protocol; a modality is a class in a file of its own, named here. A task names its
modality by these names (`Task.modality`); they are the columns of examples, too. Imports no
pyarrow: the module of a modality is imported when it is first needed."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from rekindle.errors import RequestError

if TYPE_CHECKING:
    from rekindle.modalities.base import Modality

MODALITIES = {
    "text": "rekindle.modalities.text:Text",
    "words": "rekindle.modalities.words:Words",
    "image": "rekindle.modalities.image:Image",
    "document": "rekindle.modalities.document:Document",
}


@functools.cache
def load_modality(name: str) -> Modality[Any, Any]:
    """The modality of this name. Raises RequestError where there is none."""
    if name not in MODALITIES:
        message = f"the task reads the modality `{name}`, which does not exist"
        raise RequestError(message, where="task", fix=f"use one of {', '.join(MODALITIES)}")
    module, _, attribute = MODALITIES[name].partition(":")
    modality_class: type[Modality[Any, Any]] = getattr(importlib.import_module(module), attribute)
    return modality_class()
