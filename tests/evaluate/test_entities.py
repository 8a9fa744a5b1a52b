"""Entities in tags, against a reading of one word after the other, and cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.objectives.tags.scores import Scheme, count_entities

# tags of one text: the entities in them, as (first word, word behind, type)
CASES = {
    "B-A I-A O B-B": [(0, 2, "A"), (3, 4, "B")],
    "B-A B-A": [(0, 1, "A"), (1, 2, "A")],
    "I-A I-A": [(0, 2, "A")],
    "O I-A I-B I-B": [(1, 2, "A"), (2, 4, "B")],
    "B-A I-B": [(0, 1, "A"), (1, 2, "B")],
    "S-A S-A U-B": [(0, 1, "A"), (1, 2, "A"), (2, 3, "B")],
    "B-A I-A E-A I-A": [(0, 3, "A"), (3, 4, "A")],
    "B-A L-A L-A": [(0, 2, "A"), (2, 3, "A")],
    "O O": [],
    "NOUN NOUN VERB": [(0, 1, "NOUN"), (1, 2, "NOUN"), (2, 3, "VERB")],
    "B-per-son I-per-son": [(0, 2, "per-son")],
    "X-A": [(0, 1, "X-A")],
}


@pytest.mark.parametrize("text", CASES)
def test_entities_are_those_that_conll_sees(text):
    tags = text.split()
    names = sorted(set(tags))
    scheme = Scheme.of(names)
    firsts = np.array([True, *[False] * (len(tags) - 1)])
    starts, ends, types = scheme.spans(np.array([names.index(t) for t in tags]), firsts)
    expected = CASES[text]
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [e[:2] for e in expected]
    same = [[a == b for b in types.tolist()] for a in types.tolist()]
    assert same == [[a[2] == b[2] for b in expected] for a in expected]


def entities(tags):
    """As conlleval reads them: one word after the other."""
    found, start, kind, closed = set(), None, None, False
    for at, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-") if tag and tag != "O" else ("O", "", None)
        goes_on = name is not None and name == kind and not closed and prefix in "IEL"
        if start is not None and not goes_on:
            found.add((start, at, kind))
            start = kind = None
        if name is not None and not goes_on:
            start, kind = at, name
        closed = prefix in "ELSU"
    return found


TAGS = ["O", *(f"{p}-{t}" for p in "BIESUL" for t in "AB")]
SENTENCES = st.lists(
    st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from([*TAGS, None])), max_size=8),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(SENTENCES)
def test_counts_of_any_texts_are_those_of_reading_them_word_by_word(sentences):
    index = {None: -1} | {tag: number for number, tag in enumerate(TAGS)}
    true, guessed = (
        [[index[pair[side]] for pair in text] for text in sentences] for side in (0, 1)
    )
    flat = [
        np.array([tag for text in texts for tag in text], np.int64) for texts in (true, guessed)
    ]
    lengths = np.array([len(text) for text in sentences])
    found = [counts.sum(1) for counts in count_entities(Scheme.of(TAGS), *flat, lengths)]
    for text, *numbers in zip(sentences, *(column.tolist() for column in found), strict=True):
        there, theirs = (entities([pair[side] or "O" for pair in text]) for side in (0, 1))
        assert numbers == [len(there & theirs), len(theirs), len(there)]
