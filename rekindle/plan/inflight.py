"""What a rank of a pipeline holds at once, and in which order it works (1F1B and interleaved:
Narayanan et al. 2021, arXiv 2104.04473; zero bubble in a V: Qi et al. 2024, arXiv 2405.15362)."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

from rekindle.spec.layout import Layout

Action = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Moment:
    """A forward or backward pass of a rank's stage number `stage` (0 or 1). By stage: micro-batches
    that are `held`, this one included; those whose backward pass lacks the gradients of weights
    (`halved`: zero bubble); how many went `forward` and `backward` so far."""

    stage: int
    is_backward: bool
    held: tuple[int, ...]
    halved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def there(self) -> tuple[bool, ...]:
        return tuple(bool(done) for done in self.backward)


def stages_of(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Which pieces a rank runs: one, or two, in a loop (interleaved) or in a V."""
    if layout.stages == layout.pp:
        return (pp_rank,)
    if layout.schedule == "interleaved":
        return pp_rank, pp_rank + layout.pp
    return pp_rank, 2 * layout.pp - 1 - pp_rank


def order(layout: Layout, pp_rank: int, micro: int) -> list[Action]:
    """What a rank does, one after the other, and with which of its stages: F, a forward pass, B, a
    backward pass, which zero bubble divides into I, the gradient of the input, and W, those of
    weights. As torch's schedules do it: the last of four ranks FBFB..., the first FFFFBFBF..."""
    if layout.stages == layout.pp:
        warm_up = min(micro, layout.pp - pp_rank)
        steady = [("B", 0), ("F", 0)] * (micro - warm_up)
        return [("F", 0)] * warm_up + steady + [("B", 0)] * warm_up
    if layout.schedule == "interleaved":
        return _interleaved(layout.pp, pp_rank, micro)
    return _zero_bubble(layout.pp, pp_rank, micro)


def _interleaved(pp: int, pp_rank: int, micro: int) -> list[Action]:
    """In rounds of as many micro-batches as there are ranks, first one stage, then the other."""
    around = micro // max(1, micro // pp)
    warm_up = min(2 * micro, around + 2 * (pp - 1 - pp_rank))
    found: list[Action] = []
    for turn in range(2 * micro + warm_up):
        if turn < 2 * micro:
            found.append(("F", turn // around % 2))
        if turn >= warm_up:
            found.append(("B", 1 - (turn - warm_up) // around % 2))
    return found


def _zero_bubble(pp: int, pp_rank: int, micro: int) -> list[Action]:
    """Fills up with micro-batches that are not there where a step has too few."""
    left = pp - pp_rank
    first, second = [("I", 0), ("W", 0)], [("F", 1), ("I", 1), ("W", 1)]
    found = [("F", 0)] * (2 * left - 1) + [("F", 1), ("F", 0)] * pp_rank + second * left
    started = 2 * left - 1 + pp_rank
    more = max(2 * pp - 1, micro) - started
    found += ([("F", 0), *first, *second]) * more + [*first, *second] * (started - pp)
    found += [("I", 0), ("I", 1)] * pp_rank + first * left
    found += [("W", 1)] * pp_rank + [("W", 0)] * pp_rank
    seen: dict[Action, int] = {}
    kept = []
    for action in found:
        seen[action] = seen.get(action, 0) + 1
        if seen[action] <= micro:
            kept.append(action)
    return kept


@functools.cache
def moments(
    layout: Layout, pp_rank: int, micro: int, blocks: tuple[int, ...]
) -> tuple[Moment, ...]:
    """The passes at which a rank may hold most, where its stages have so many blocks: for each
    stage, direction, and gradients that are there, those that no other one exceeds."""
    stages = stages_of(layout, pp_rank)
    held, halved = [0] * len(stages), [0] * len(stages)
    forward, backward = [0] * len(stages), [0] * len(stages)
    found: dict[object, list[tuple[int, int, Moment]]] = {}
    for action, stage in order(layout, pp_rank, micro):
        half = action in "IW" and stages[stage] > 0  # the first stage's input has no gradient
        held[stage] += action == "F"
        halved[stage] += action == "I" and half
        if action in "FB" or half == (action == "I"):
            kind = stage, action == "F", backward[0] > 0, backward[-1] > 0
            same = found.setdefault(kind, [])
            most = sum(map(operator.mul, held, blocks)), sum(map(operator.mul, halved, blocks))
            if not any(_exceeds(other, most) and other[:2] != most for other in same):
                counts = (tuple(c) for c in (held, halved, forward, backward))
                same[:] = [other for other in same if not _exceeds(most, other)]
                same.append((*most, Moment(stage, action != "F", *counts)))
        forward[stage] += action == "F"
        if action in "BW":
            held[stage] -= 1
            halved[stage] -= half
            backward[stage] += 1
    return tuple(one for same in found.values() for _, _, one in same)


def _exceeds(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """In blocks that are held, and in those that are halved."""
    return bool(one[0] >= other[0] and one[1] >= other[1])
