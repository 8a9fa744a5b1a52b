"""What a rank of a pipeline holds at once (1F1B and interleaved: Narayanan et al. 2021,
arXiv 2104.04473; zero bubble in a V: Qi et al. 2024, arXiv 2405.15362), as torch's
schedules run it."""

import dataclasses
from collections.abc import Iterator

from rekindle.spec.layout import Layout


@dataclasses.dataclass(frozen=True)
class Moment:
    """A forward or backward pass of a rank's stage number `stage` (0 or 1). By stage:
    micro-batches that are `held`, this one included; those whose backward pass lacks the
    gradients of weights (`halved`: zero bubble); and how many have finished their
    backward pass (`finished`)."""

    stage: int
    is_backward: bool
    held: tuple[int, ...]
    halved: tuple[int, ...]
    finished: tuple[int, ...]

    @property
    def has_gradients(self) -> tuple[bool, ...]:
        """Which stages have gradients."""
        return tuple(count > 0 for count in self.finished)


def stages_of(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """The stages that a rank runs: one, or two, in a loop (interleaved) or in a V."""
    if layout.stages == layout.pp:
        return (pp_rank,)
    if layout.schedule == "interleaved":
        return pp_rank, pp_rank + layout.pp
    return pp_rank, 2 * layout.pp - 1 - pp_rank


def most_held(layout: Layout, pp_rank: int, micro: int) -> tuple[int, ...]:
    """Micro-batches of each stage when a rank holds most. Of four ranks and eight
    micro-batches the first holds 4 with 1F1B, 7 and 4 interleaved, 7 and 1 with zero
    bubble."""
    pp = layout.pp
    # this rank and those behind it: a micro-batch comes back after it has been through
    # them
    ranks_ahead = pp - pp_rank
    if layout.stages == pp:
        return (min(micro, ranks_ahead),)
    if layout.schedule == "zero_bubble":
        return min(micro, pp + ranks_ahead - 1), min(micro, pp_rank + 1)
    # in rounds of as many as there are ranks, first one stage, then the other
    round_size = micro // max(1, micro // pp)
    most = min(2 * micro, round_size + 2 * ranks_ahead - 1)
    second_stage = min(round_size, most - round_size)
    return most - second_stage, second_stage


def moments(layout: Layout, pp_rank: int, micro: int) -> Iterator[Moment]:
    """The passes at which a rank may hold most: of each stage, before it has gradients
    and after, and the last one; with zero bubble also that which has put off most
    gradients of weights."""
    most = most_held(layout, pp_rank, micro)
    splits_backward = layout.schedule == "zero_bubble"
    none = (0,) * len(most)
    times = [(most, none)]
    if micro > 1:
        held_after = (*most[:-1], min(most[-1], micro - 1))
        times.append((held_after, tuple(micro - micro_batches for micro_batches in held_after)))
    for number, stage in enumerate(stages_of(layout, pp_rank)):
        halved = list(none)
        # the first stage's input has no gradient, so its backward pass is not cut in
        # halves
        if splits_backward and stage > 0:
            halved[number] = 1
        for micro_batches, finished in times:
            yield Moment(number, False, micro_batches, none, finished)
            yield Moment(number, True, micro_batches, tuple(halved), finished)
    yield Moment(0, True, (1, *none[1:]), none, (micro - 1, micro)[: len(most)])
    if splits_backward and pp_rank > 0 and micro > layout.pp:
        finished = micro - layout.pp, micro - pp_rank
        yield Moment(0, True, (layout.pp, pp_rank), (pp_rank + 1, pp_rank), finished)
