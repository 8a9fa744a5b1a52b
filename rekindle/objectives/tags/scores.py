"""Scores of a tagger: the probability of each tag, of each word, and the entities in
them.

Entities are counted as the CoNLL-2000 evaluation does
(www.clips.uantwerpen.be/conll2000/chunking/output.html): right only with the exact words
and type. `B-X` begins an entity of type X, `I-X` goes on with it; `S-X` and `U-X` are
entities of one word, `E-X` and `L-X` end one. `I-X` that follows no X begins one, too.
`O` is outside of all. A tag of another form, such as a part of speech, is an entity of
one word.

Words that a contender cut off have logits of zero: no prediction, and each tag equally
probable. Shapes: N texts, W words of all of them one after the other, C tags, R
resamples."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa

from rekindle.errors import DataError
from rekindle.objectives.classes.scores import beats_majority, class_result, indices_of
from rekindle.objectives.scores import EPSILON, Bools, Floats, Ints, ModelScores
from rekindle.objectives.tags import KIND
from rekindle.records import Check, ClassResult, Contender

Triple = tuple[Ints, Ints, Ints]

NO_TAG = -1
OUTSIDE = "O"
# prefixes of words that begin an entity, are one, or end one
_FIRST = "B"
_ALONE = "SU"
_LAST = "EL"
_PREFIXES = "BI" + _ALONE + _LAST


@dataclasses.dataclass(frozen=True)
class TagScores(ModelScores):
    """The true tag of each word, the predicted one (`NO_TAG` for none), and the loss of
    the true one in nats, each [W]; how many words each text has, [N]; what the tags mean;
    the `costs`, in nats a word, of further texts of the mean size."""

    true_W: Ints
    predicted_W: Ints
    nats_W: Floats
    lengths_N: Ints
    scheme: "Scheme"
    costs: tuple[float, ...] = ()

    METRIC: ClassVar[str] = "entity_f1"
    SLICE_METRIC: ClassVar[str] = "token_accuracy"  # a slice may be without an entity

    @classmethod
    def of(cls, rows: pa.Table, who: str, contender: Contender) -> Self:
        from scipy.special import softmax  # which takes a fifth of a second

        labels = rows.column("label").combine_chunks()
        true_W = indices_of(labels.flatten(), contender.labels)
        lengths_N = np.asarray(labels.value_lengths(), np.int64)
        if not len(rows):
            return cls(true_W, true_W, np.zeros(0), lengths_N, Scheme.of(contender.labels))
        tags = len(contender.labels)
        column = rows.column(who).combine_chunks().field("logits")
        if not np.array_equal(np.asarray(column.value_lengths(), np.int64), lengths_N * tags):
            message = f"the scores of the {who} are those of other words"
            raise DataError(message, where="scores", fix="run the step `score` again")
        logits_WC = np.asarray(column.flatten(), np.float64).reshape(-1, tags)
        of_true_W = softmax(logits_WC, 1)[np.arange(len(true_W)), true_W]
        # a word that was cut off has zeros
        is_predicted_W = logits_WC.max(1) != logits_WC.min(1)
        predicted_W = np.where(is_predicted_W, logits_WC.argmax(1), NO_TAG)
        nats_W = -np.log(np.clip(of_true_W, EPSILON, 1.0))
        return cls(true_W, predicted_W, nats_W, lengths_N, Scheme.of(contender.labels))

    def __len__(self) -> int:
        return len(self.lengths_N)

    @functools.cached_property
    def _entities(self) -> Triple:
        return count_entities(self.scheme, self.true_W, self.predicted_W, self.lengths_N)

    @functools.cached_property
    def _sums(self) -> Mapping[str, Floats]:
        """What metrics are ratios of, of each text: [N]."""
        hits_NT, predicted_NT, true_NT = self._entities
        text_W = np.repeat(np.arange(len(self)), self.lengths_N)

        def sum_by_text(values_W: np.ndarray) -> Floats:
            return np.asarray(np.bincount(text_W, values_W, len(self)), np.float64)

        sums = {
            "hits": hits_NT.sum(1).astype(np.float64),
            "predicted": predicted_NT.sum(1).astype(np.float64),
            "true": true_NT.sum(1).astype(np.float64),
            "nats": sum_by_text(self.nats_W),
            "right": sum_by_text(self.predicted_W == self.true_W),
            "words": self.lengths_N.astype(np.float64),
        }
        entities = sums["true"].mean()
        words = sums["words"].mean()
        for cost in self.costs:
            further_text = {
                "hits": entities,
                "predicted": entities,
                "true": entities,
                "nats": cost * words,
                "right": words,
                "words": words,
            }
            # at no cost all is right, at any other nothing
            if cost:
                further_text["hits"] = 0.0
                further_text["right"] = 0.0
            for name, value in further_text.items():
                sums[name] = np.append(sums[name], value)
        return sums

    @functools.cached_property
    def metrics(self) -> Mapping[str, float]:
        if len(self) and not self.finite:
            return dict.fromkeys(KIND.metrics, math.nan)
        return self.measured(KIND.metrics)

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.nats_W).all())

    @property
    def sizes_N(self) -> Floats:
        return np.asarray(self.lengths_N, np.float64)

    def weighted(self, metric: str, weights_RN: Floats) -> Floats:
        """A ratio of sums over the texts; 0 where there is no entity, as CoNLL has it."""
        sums = {name: weights_RN @ values_N for name, values_N in self._sums.items()}
        ratios = {
            "entity_f1": (2 * sums["hits"], sums["predicted"] + sums["true"]),
            "entity_precision": (sums["hits"], sums["predicted"]),
            "entity_recall": (sums["hits"], sums["true"]),
            "token_accuracy": (sums["right"], sums["words"]),
            "log_loss": (sums["nats"], sums["words"]),
        }
        above_R, below_R = ratios[metric]
        ratio_R: Floats = above_R / np.where(below_R > 0, below_R, 1.0)
        return ratio_R

    def worst(self, metric: str, other: Self, rare: bool = False) -> float:
        """Probabilities count as 1e-12 at least: 27.6 nats."""
        return -math.log(EPSILON)

    def with_one_more(self, cost: float) -> Self:
        return dataclasses.replace(self, costs=(*self.costs, cost))

    def trivial(self, metric: str) -> Check:
        share = float(np.bincount(self.true_W).max() / len(self.true_W))
        return beats_majority("token_accuracy", self.metrics["token_accuracy"], share, "tag")

    def picked(self, pick_N: np.ndarray) -> Self:
        pick_W = np.repeat(pick_N, self.lengths_N)
        return type(self)(
            self.true_W[pick_W],
            self.predicted_W[pick_W],
            self.nats_W[pick_W],
            self.lengths_N[pick_N],
            self.scheme,
        )

    def answers(self) -> tuple[Ints, Ints]:
        return self.predicted_W, self.true_W

    def confusion(self) -> tuple[tuple[int, ...], ...]:
        """Of words with a prediction."""
        tags = len(self.scheme.type_C)
        is_predicted_W = self.predicted_W != NO_TAG
        flat = self.true_W[is_predicted_W] * tags + self.predicted_W[is_predicted_W]
        counts_CC = np.bincount(flat, minlength=tags * tags).reshape(tags, tags)
        return tuple(map(tuple, counts_CC.tolist()))

    def classes(self) -> tuple[ClassResult, ...]:
        if not len(self):
            return ()
        columns = [counts_NT.sum(0).tolist() for counts_NT in self._entities]
        rows = zip(self.scheme.names, *columns, strict=True)
        return tuple(class_result(*row) for row in rows)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """What each of the C tags means: `type_C` numbers its type among `names`, -1 outside
    of entities; whether it begins, or ends, an entity whatever stands beside it."""

    names: tuple[str, ...]
    type_C: Ints
    begins_C: Bools
    ends_C: Bools

    @classmethod
    def of(cls, tags: Sequence[str]) -> Self:
        prefixes, types = zip(*map(_parts, tags), strict=True)
        names = tuple(sorted({name for name in types if name is not None}))
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
        numbers[None] = -1
        type_C = np.array([numbers[name] for name in types], np.int64)
        begins_C = np.array([prefix in _FIRST + _ALONE for prefix in prefixes], bool)
        ends_C = np.array([prefix in _ALONE + _LAST for prefix in prefixes], bool)
        return cls(names, type_C, begins_C, ends_C)

    def spans(self, tags_W: Ints, firsts_W: Bools) -> Triple:
        """Where entities begin, where each ends (the word behind it), and its type.
        `tags_W` is -1 where a word has no tag; `firsts_W` marks the first word of each
        text."""
        has_tag_W = tags_W >= 0
        index_W = np.maximum(tags_W, 0)  # any tag, where there is none
        type_W = np.where(has_tag_W, self.type_C[index_W], -1)
        begins_W = self.begins_C[index_W] & has_tag_W
        ends_W = self.ends_C[index_W] & has_tag_W
        # whether the word before has another type, or ends its entity
        changes_W = type_W != np.concatenate([[-1], type_W[:-1]])
        is_behind_end_W = np.concatenate([[False], ends_W[:-1]])
        break_W = firsts_W | changes_W | is_behind_end_W | begins_W
        # an entity ends where the next thing begins, or with the words
        breaks = np.append(np.flatnonzero(break_W), len(tags_W))
        starts = np.flatnonzero(break_W & (type_W >= 0))
        return starts, breaks[np.searchsorted(breaks, starts, side="right")], type_W[starts]


def _parts(tag: str) -> tuple[str, str | None]:
    """Prefix and type; ("S", the tag) without a prefix, a type of None outside."""
    if tag == OUTSIDE:
        return OUTSIDE, None
    prefix, dash, name = tag.partition("-")
    if dash and len(prefix) == 1 and prefix in _PREFIXES:
        return prefix, name
    return "S", tag


def count_entities(scheme: Scheme, true_W: Ints, predicted_W: Ints, lengths_N: Ints) -> Triple:
    """Of each text and type, [N, types]: entities found exactly, predicted, and there."""
    # no entity goes from one text into the next
    firsts_W = np.zeros(len(true_W), bool)
    starts_N = np.cumsum(lengths_N) - lengths_N
    firsts_W[starts_N[lengths_N > 0]] = True
    text_W = np.repeat(np.arange(len(lengths_N)), lengths_N)
    true_starts, true_ends, true_types = scheme.spans(true_W, firsts_W)
    starts, ends, types = scheme.spans(predicted_W, firsts_W)
    # where the true entity that begins at a word ends, and its type
    true_end_W = np.full(len(true_W), -1)
    true_end_W[true_starts] = true_ends
    true_type_W = np.full(len(true_W), -1)
    true_type_W[true_starts] = true_types
    is_hit = (true_end_W[starts] == ends) & (true_type_W[starts] == types)

    def counts(words: Ints, kinds: Ints) -> Ints:
        size = len(lengths_N) * len(scheme.names)
        flat = np.bincount(text_W[words] * len(scheme.names) + kinds, minlength=size)
        return flat.reshape(len(lengths_N), len(scheme.names))

    return (
        counts(starts[is_hit], types[is_hit]),
        counts(starts, types),
        counts(true_starts, true_types),
    )


SCORES = TagScores
