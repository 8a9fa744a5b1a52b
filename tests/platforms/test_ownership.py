"""What rekindle made for a model is told from what others made."""

import pytest

from rekindle.errors import RequestError
from rekindle.platforms.ownership import OwnerMark

MARK = OwnerMark("label", "rekindle", "tickets")


def test_what_carries_the_mark_is_ours() -> None:
    tags = {"team": "search", **MARK.tags}
    assert MARK.is_on(tags)
    MARK.check("endpoints/tickets", tags, where="here")


@pytest.mark.parametrize("tags", [None, {}, {"rekindle": "other"}, {"team": "tickets"}])
def test_what_carries_none_or_anothers_is_refused_with_what_it_lacks(
    tags: dict[str, str] | None,
) -> None:
    assert not MARK.is_on(tags)
    with pytest.raises(RequestError) as caught:
        MARK.check("endpoints/tickets", tags, where="here")
    (problem,) = caught.value.problems
    assert problem.what == (
        "endpoints/tickets was not made by rekindle for this model: "
        "it lacks the label rekindle=tickets"
    )
    assert (problem.where, "register.model_name" in problem.fix) == ("here", True)
