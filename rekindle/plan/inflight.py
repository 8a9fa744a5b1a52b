"""How many micro-batches a rank of a pipeline holds at once: between the forward and the backward
pass of a stage."""

from __future__ import annotations

import functools

from rekindle.spec.layout import Layout


def stages_of(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Which pieces a rank runs: one, or two, in a loop (interleaved) or in a V."""
    if layout.stages == layout.pp:
        return (pp_rank,)
    if layout.schedule == "interleaved":
        return pp_rank, pp_rank + layout.pp
    return pp_rank, 2 * layout.pp - 1 - pp_rank


@functools.cache
def in_flight(layout: Layout, pp_rank: int, micro: int) -> tuple[int, ...]:
    """How many at the fullest moment, for each stage of the rank.

    One stage a rank (1F1B, Narayanan et al. 2021, arXiv 2104.04473): the first of four ranks holds
    four, the last one. Interleaved (there, too): what the warm-up runs and one more. Zero bubble in
    a V (Qi et al. 2024, arXiv 2405.15362): twice as many as ranks, of both stages together, where
    there are so many."""
    pp = layout.pp
    if pp == 1:
        return (1,)
    if layout.stages == pp:
        return (min(micro, pp - pp_rank),)
    if layout.schedule == "interleaved":
        return _interleaved(pp, pp_rank, micro)
    return _zero_bubble(pp, pp_rank, micro)


def _interleaved(pp: int, pp_rank: int, micro: int) -> tuple[int, ...]:
    """In rounds of as many micro-batches as there are ranks, first the one stage, then the other,
    backwards the other way round."""
    around = micro // max(1, micro // pp)
    warm_up = min(2 * micro, around + 2 * (pp - 1 - pp_rank))
    held, fullest = [0, 0], (0, 0)
    for turn in range(2 * micro):
        held[turn // around % 2] += 1
        if sum(held) > sum(fullest):
            fullest = held[0], held[1]
        if turn >= warm_up:
            held[1 - (turn - warm_up) // around % 2] -= 1
    return fullest


def _zero_bubble(pp: int, pp_rank: int, micro: int) -> tuple[int, ...]:
    """The order of torch's ScheduleZBVZeroBubble, which fills up with micro-batches that are not
    there where a step has too few. In capitals forwards of the first and of the second stage,
    backwards in small letters."""
    left = pp - pp_rank
    order = "A" * (2 * left - 1) + "BA" * pp_rank + "Bb" * left
    started = 2 * left - 1 + pp_rank
    more = max(2 * pp - 1, micro) - started
    order += "AaBb" * more + "aBb" * (started - pp)
    seen, held, fullest = dict.fromkeys("AaBb", 0), {"A": 0, "B": 0}, (0, 0)
    for step in order:
        seen[step] += 1
        if seen[step] <= micro:
            held[step.upper()] += 1 if step.isupper() else -1
        if sum(held.values()) > sum(fullest):
            fullest = held["A"], held["B"]
    return fullest
