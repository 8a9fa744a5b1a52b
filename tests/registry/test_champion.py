"""The champion is its files: a registry that was set up again gives out its version numbers again, and nothing that was
learned of the old version 1 counts for the new one."""

import pytest

from rekindle.errors import RegistryError
from rekindle.records import Check
from rekindle.registry.models import champion_state, comparisons, fetch_model
from rekindle.registry.promotion import promote
from rekindle.train.modelfolder import digest_of
from tests.registry.versions import model_in, registered, registry_in


@pytest.mark.slow
def test_a_version_number_that_is_given_out_again_is_another_champion(tmp_path):
    first, other, better = (model_in(tmp_path / name, name.encode()) for name in ("1", "2", "3"))
    before, after = registry_in(tmp_path / "before"), registry_in(tmp_path / "after")
    for where, model in ((before, first), (after, other)):
        assert promote(where, *registered(where, model)).version == "1"
    states = [champion_state(where) for where in (before, after)]
    assert [state.version for state in states] == ["1", "1"]
    assert [state.digest for state in states] == [digest_of(first), digest_of(other)]

    assert digest_of(fetch_model(after, "1", states[1].digest)) == states[1].digest
    with pytest.raises(RegistryError, match="version 1 of digits is another model than when"):
        fetch_model(after, "1", states[0].digest)
    (fetch_model(before, "1", states[0].digest) / "model.safetensors").unlink()
    with pytest.raises(RegistryError, match="are not those that were registered: some are miss"):
        fetch_model(before, "1", states[0].digest)

    stale = {"champion_version": "1", "champion_digest": states[0].digest}
    with pytest.raises(RegistryError, match="version 1, is another model now than the one that"):
        promote(after, *registered(after, better, **stale))
    assert champion_state(after).version == "1"
    fresh = {"champion_version": "1", "champion_digest": states[1].digest}
    assert promote(after, *registered(after, better, **fresh)).version == "2"
    state = champion_state(after)
    assert (state.version, state.beaten, state.beaten_digest) == ("2", "1", states[1].digest)


def test_a_champion_that_does_not_say_its_files_is_refused(tmp_path):
    where = registry_in(tmp_path)
    promote(where, *registered(where, model_in(tmp_path / "model", b"1")))
    with where.open("forget the files") as client:
        client.delete_model_version_tag("digits", "1", "rekindle.model_digest")
    with pytest.raises(
        RegistryError, match=r"version 1 of digits has no tag rekindle\.model_digest"
    ):
        champion_state(where)


@pytest.mark.slow
def test_a_version_keeps_what_it_was_promoted_for_when_a_later_champion_beats_it(tmp_path):
    """The same config again, after another was promoted: its work is judged against that one."""
    where = registry_in(tmp_path)
    first, second = (model_in(tmp_path / name, name.encode()) for name in ("1", "2"))
    promote(where, *registered(where, first))
    beaten = {"champion_version": "1", "champion_digest": champion_state(where).digest}
    promote(where, *registered(where, second, **beaten))
    now = {"champion_version": "2", "champion_digest": champion_state(where).digest}

    again, evidence = registered(where, first, better=False, **now)
    assert (again.version, again.decision, again.created) == ("1", "refused", False)
    with pytest.raises(RegistryError, match="the gate refused it"):
        promote(where, again, evidence)
    with where.open("look") as client:
        tags = client.get_model_version("digits", "1").tags
    assert (tags["rekindle.decision"], tags["rekindle.beaten"]) == ("promoted", "")

    assert promote(where, *registered(where, first, **now)).version == "1"
    assert champion_state(where).beaten == "2"


@pytest.mark.slow
def test_comparisons_are_counted_by_epoch_and_an_exact_rerun_is_the_same_look(tmp_path):
    where = registry_in(tmp_path / "home")
    looks = [("a", ""), ("b", "first"), ("c", "first"), ("d", "second"), ("e", "first")]
    models = {name: model_in(tmp_path / name, name.encode()) for name, _ in looks}
    counted = {}
    for name, epoch in looks:
        counted[name] = comparisons(where, models[name])
        for _ in range(2):  # twice: a rerun finds its version
            registered(where, models[name], better=False, epoch=epoch)
    assert counted == {
        "a": {},
        "b": {},
        "c": {"first": 1},
        "d": {"first": 2},
        "e": {"first": 2, "second": 1},
    }
    assert {name: comparisons(where, model) for name, model in models.items()} == counted


def test_what_cannot_be_compared_needs_a_persons_reason_and_nothing_else_against_it(tmp_path):
    """Else a class more would block every later model."""
    where = registry_in(tmp_path)
    first, second, third = (model_in(tmp_path / name, name.encode()) for name in "123")
    promote(where, *registered(where, first))
    now = {"champion_version": "1", "champion_digest": champion_state(where).digest}
    other = Check(name="same_classes", passed=False, detail="the champion knows other classes")
    floor = Check(name="floor_accuracy", passed=False, detail="accuracy 0.1 is not at least 0.7")
    bad = registered(where, second, better=False, checks=(other, floor), **now)
    for reason in ("", "new classes"):
        with pytest.raises(RegistryError, match="the gate refused it"):
            promote(where, *bad, reason)
    good = registered(where, third, better=False, checks=(other,), **now)
    assert good[0].decision == "refused"
    with pytest.raises(RegistryError, match="the gate refused it"):
        promote(where, *good)
    assert promote(where, *good, "new classes").decision == "promoted"
    assert champion_state(where).version == good[0].version
