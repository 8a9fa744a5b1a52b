"""What the inference thread makes of a turn that memory does not suffice for."""

from rekindle.serve.work import Model, PendingInstance, RefusedError, WritingOptions


class Narrow(Model):
    """Answers one instance at a time; with more than one, all that it works on run out of memory."""

    def __init__(self):
        self.under_way = []

    def turn(self, new):
        works = [*self.under_way, *new]
        self.under_way = []
        if len(works) > 1:
            return [(work, RefusedError(503, "no memory", "out_of_memory")) for work in works]
        return [(work, f"answer to {work.content}") for work in works]


def test_what_was_under_way_when_memory_ran_out_is_refused_and_not_forgotten():
    """Its client waited for ever: its refusal was dropped with those of the new instances, which are tried again."""
    model = Narrow()
    under_way = PendingInstance("an earlier text", WritingOptions())
    model.under_way = [under_way]
    new = [PendingInstance("a", WritingOptions()), PendingInstance("b", WritingOptions())]
    events = dict(model.turn_with_retry(new))
    assert isinstance(events[under_way], RefusedError)
    assert [events[work] for work in new] == ["answer to a", "answer to b"]
