"""Entities in sequences of tags, counted as the CoNLL-2000 evaluation does
(www.clips.uantwerpen.be/conll2000/chunking/output.html): right only with the exact words and type.

`B-X` begins an entity of type X, `I-X` goes on with it; `S-X` and `U-X` are entities of one word,
`E-X` and `L-X` end one. `I-X` that follows no X begins one, too. `O` is outside of all. A tag of
another form, such as a part of speech, is an entity of one word. Shapes: W words of all texts, C
tags."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rekindle.evaluate.metrics import Ints

Bools = npt.NDArray[np.bool_]

OUTSIDE = "O"
_FIRST, _ALONE, _LAST = "B", "SU", "EL"
_PREFIXES = "BI" + _ALONE + _LAST


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What each of the C tags means: `type_C` numbers its type among `names`, -1 outside of
    entities; whether it begins an entity whatever stands before, and whether it ends one whatever
    follows."""

    names: tuple[str, ...]
    type_C: Ints
    begins_C: Bools
    ends_C: Bools

    @classmethod
    def of(cls, tags: Sequence[str]) -> Scheme:
        """The meaning of `tags`, in index order."""
        prefixes, types = zip(*map(_parts, tags), strict=True)
        names = tuple(sorted({name for name in types if name is not None}))
        numbers = {name: number for number, name in enumerate(names)}
        return cls(
            names,
            np.array([-1 if t is None else numbers[t] for t in types], np.int64),
            np.array([p in _FIRST + _ALONE for p in prefixes], bool),
            np.array([p in _ALONE + _LAST for p in prefixes], bool),
        )

    def spans(self, tags_W: Ints, firsts_W: Bools) -> tuple[Ints, Ints, Ints]:
        """Where entities begin, where each ends (the word behind it), and its type. `tags_W` is -1
        where a word has no tag; `firsts_W` marks the first word of each text."""
        known_W = tags_W >= 0
        at_W = np.maximum(tags_W, 0)
        type_W = np.where(known_W, self.type_C[at_W], -1)
        before_W = np.concatenate([[-1], type_W[:-1]])
        ended_W = np.concatenate([[False], (self.ends_C[at_W] & known_W)[:-1]])
        break_W = firsts_W | (type_W != before_W) | ended_W | (self.begins_C[at_W] & known_W)
        breaks = np.append(np.flatnonzero(break_W), len(tags_W))
        starts = np.flatnonzero(break_W & (type_W >= 0))
        ends = breaks[np.searchsorted(breaks, starts, side="right")]
        return starts, ends, type_W[starts]


def _parts(tag: str) -> tuple[str, str | None]:
    """Prefix and type; ("S", the tag) for one without a prefix, a type of None outside."""
    if tag == OUTSIDE:
        return OUTSIDE, None
    prefix, dash, name = tag.partition("-")
    if dash and len(prefix) == 1 and prefix in _PREFIXES:
        return prefix, name
    return "S", tag


def counted(
    scheme: Scheme, true_W: Ints, predicted_W: Ints, lengths_N: Ints
) -> tuple[Ints, Ints, Ints]:
    """Of each text and type, [N, types]: entities found (exact words and type), entities predicted,
    entities there are."""
    firsts_W = np.zeros(len(true_W), bool)
    starts_N = np.cumsum(lengths_N) - lengths_N
    firsts_W[starts_N[lengths_N > 0]] = True
    text_W = np.repeat(np.arange(len(lengths_N)), lengths_N)
    there, guessed = (scheme.spans(tags_W, firsts_W) for tags_W in (true_W, predicted_W))
    end_W, type_W = np.full(len(true_W), -1), np.full(len(true_W), -1)
    end_W[there[0]], type_W[there[0]] = there[1], there[2]
    starts, ends, types = guessed
    hit = (end_W[starts] == ends) & (type_W[starts] == types)

    def counts(words: Ints, kinds: Ints) -> Ints:
        size = len(lengths_N) * len(scheme.names)
        flat = np.bincount(text_W[words] * len(scheme.names) + kinds, minlength=size)
        return flat.reshape(len(lengths_N), len(scheme.names))

    return counts(starts[hit], types[hit]), counts(starts, types), counts(there[0], there[2])
