"""How many micro-batches a rank of a pipeline holds at once: between the forward and the backward
pass of a stage."""

from __future__ import annotations

from rekindle.spec.layout import Layout


def in_flight(layout: Layout, pp_rank: int, micro: int) -> list[int]:
    """Most at a time, for each stage of the rank.

    One stage a rank (1F1B, Narayanan et al. 2021, arXiv 2104.04473): the first of four ranks holds
    four, the last one. Interleaved: those of the warm-up and one more.
    Zero bubble in a V (Qi et al. 2024, arXiv 2405.15362): twice the ranks, of both stages."""
    pp = layout.pp
    if pp == 1:
        return [1]
    if layout.stages == pp:
        return [min(micro, pp - pp_rank)]
    if layout.schedule == "interleaved":
        total = min(2 * micro, pp + 2 * (pp - pp_rank - 1) + 1)
        second = max(1, min(micro, total - min(micro, pp + pp - pp_rank - 1)))
        return [total - second, second]
    first = min(micro, 2 * pp - 1 - pp_rank)
    return [first, max(1, min(micro, 2 * pp - first))]
