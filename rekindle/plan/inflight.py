"""What a rank of a pipeline holds at once (1F1B and interleaved: Narayanan et al. 2021, arXiv
2104.04473; zero bubble in a V: Qi et al. 2024, arXiv 2405.15362), as torch's schedules run it."""

import dataclasses
from collections.abc import Iterator

from rekindle.spec.layout import Layout


@dataclasses.dataclass(frozen=True)
class Moment:
    """A forward or backward pass of a rank's stage number `stage` (0 or 1). By stage: micro-batches
    that are `held`, this one included; those whose backward pass lacks the gradients of weights
    (`halved`: zero bubble); and how many have gone `backward`."""

    stage: int
    is_backward: bool
    held: tuple[int, ...]
    halved: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def there(self) -> tuple[bool, ...]:
        """Which stages have gradients."""
        return tuple(done > 0 for done in self.backward)


def stages_of(layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """Which pieces a rank runs: one, or two, in a loop (interleaved) or in a V."""
    if layout.stages == layout.pp:
        return (pp_rank,)
    if layout.schedule == "interleaved":
        return pp_rank, pp_rank + layout.pp
    return pp_rank, 2 * layout.pp - 1 - pp_rank


def most_held(layout: Layout, pp_rank: int, micro: int) -> tuple[int, ...]:
    """Micro-batches of each stage when a rank holds most. Of four ranks and eight micro-batches the
    first holds 4 with 1F1B, 7 and 4 interleaved, 7 and 1 with zero bubble."""
    pp, left = layout.pp, layout.pp - pp_rank
    if layout.stages == pp:
        return (min(micro, left),)
    if layout.schedule == "zero_bubble":
        return min(micro, pp + left - 1), min(micro, pp_rank + 1)
    # in rounds of as many as there are ranks, first one stage, then the other
    around = micro // max(1, micro // pp)
    both = min(2 * micro, around + 2 * left - 1)
    return both - min(around, both - around), min(around, both - around)


def moments(layout: Layout, pp_rank: int, micro: int) -> Iterator[Moment]:
    """The passes at which a rank may hold most: of each stage, before it has gradients and after,
    and the last one; with zero bubble also that which has put off most gradients of weights."""
    stages, most = stages_of(layout, pp_rank), most_held(layout, pp_rank, micro)
    halves, none = layout.schedule == "zero_bubble", (0,) * len(most)
    after = (*most[:-1], min(most[-1], micro - 1))
    times = [(most, none)] + [(after, tuple(micro - held for held in after))] * (micro > 1)
    for number, stage in enumerate(stages):
        # the first stage's input has no gradient
        half = tuple(int(halves and stage > 0 and n == number) for n in range(len(most)))
        for held, backward in times:
            yield Moment(number, False, held, none, backward)
            yield Moment(number, True, held, half, backward)
    yield Moment(0, True, (1, *none[1:]), none, (micro - 1, micro)[: len(most)])
    if halves and pp_rank > 0 and micro > layout.pp:
        backward = micro - layout.pp, micro - pp_rank
        yield Moment(0, True, (layout.pp, pp_rank), (pp_rank + 1, pp_rank), backward)
