"""The most probable tag of each word, and how probable it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from rekindle.objectives.answers import (
    Answers,
    Floats,
    Prediction,
    Settings,
    logits_of,
    sure,
    top,
)


class TagAnswers(Answers):
    """`{"tags": ["B-city", "O"], "probabilities": [0.98, 0.99]}`."""

    def of_outputs(
        self, outputs: Floats, rows: pa.Table, labels: Sequence[str], settings: Settings
    ) -> list[Prediction | None]:
        probabilities_BT, classes_BT = top(outputs)
        places = rows.column("places").to_pylist()
        texts = zip(places, probabilities_BT.tolist(), classes_BT.tolist(), strict=True)
        return [_answer(*text, labels) for text in texts]

    def of_scores(
        self, scores: pa.Scalar, labels: Sequence[str], margin: float
    ) -> Prediction | None:
        logits_WC = logits_of(scores, len(labels))
        if not sure(logits_WC, margin):
            return None
        probabilities_W, classes_W = top(logits_WC)
        tags = [labels[index] for index in classes_W]
        return {"tags": tags, "probabilities": probabilities_W.tolist()}


def _answer(
    places: list[int], probabilities: list[float], classes: list[int], labels: Sequence[str]
) -> Prediction | None:
    """The tag of each word, null where it was cut off."""
    tags: list[str | None] = []
    tag_probabilities: list[float | None] = []
    for place in places:
        if place < 0:  # the word is behind the last token that the model reads
            tags.append(None)
            tag_probabilities.append(None)
        elif not math.isfinite(probabilities[place]):
            return None
        else:
            tags.append(labels[classes[place]])
            tag_probabilities.append(probabilities[place])
    answer: Prediction = {"tags": tags, "probabilities": tag_probabilities}
    if min(places) < 0:
        answer["truncated"] = True
    return answer


ANSWERS = TagAnswers()
