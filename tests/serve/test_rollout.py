"""The roll-out's states on a platform that a test plays: what it asks of a platform, in which order, and that a
command which is killed before or after any call is completed by the same command."""

import dataclasses
import datetime

import pytest

from rekindle.cli.deploy import traffic_printer
from rekindle.errors import RequestError, StepError, StorageError, UnreachableError
from rekindle.records import RolloutEvent
from rekindle.serve.messages import ASK_SHADOW, BOUNDS_MS, ServedModel, Traffic
from rekindle.serve.rollout import Rollout, RolloutLog, serving, version_hours
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.model import ColumnsSpec
from tests.serve.models import own

CALLS = ("create", "ask", "split", "observe", "retain", "delete")
FAST = DeploySpec(canary=(10, 50), step_minutes=0, min_requests=100)
SHADOW = FAST.model_copy(update={"shadow": 20, "max_disagreement": 0.05, "canary": ()})


class Killed(BaseException):
    pass


class Platform:
    """One endpoint: its versions and their shares. It keeps the rules of real ones: shares sum to 100 and name versions
    that are there, and a version with a share is not removed."""

    address, poll_seconds = "http://played", 0.0

    def __init__(self):
        self.versions, self.shares, self.number, self.calls = set(), {}, 0, []
        self.seen = {"failed": 0, "differed": 0}  # in the shadow
        self.kill = (0, "")  # at the nth call, "before" or "after"
        self.broken, self.wrong, self.fails, self.requests = set(), set(), {}, 500
        self.refuses = {}
        self.away = None  # what is raised instead of creating a version

    def __getattribute__(self, name):
        if name not in CALLS:
            return object.__getattribute__(self, name)

        def called(*arguments):
            self.calls.append(name)
            at, when = self.kill
            if at == len(self.calls) and when == "before":
                raise Killed
            answer = object.__getattribute__(self, name)(*arguments)
            if at == len(self.calls) and when == "after":
                raise Killed
            return answer

        return called

    def create(self, model, number):
        if self.away is not None:
            raise self.away
        if model.version in self.broken:
            raise StepError("its image was not found")
        alone = model.version.startswith("0") or not any(
            one.startswith("0") for one in self.versions
        )
        assert alone, "the shadow is over"
        self.versions.add(model.version)

    def ask(self, model, body):
        assert model.version in self.versions
        if body == {"instances": [ASK_SHADOW]}:
            assert self.shares[model.version] > 0
            return {
                "predictions": [
                    {"replica": "a", "answered": self.requests, "spared": 0, **self.seen}
                ]
            }
        assert body == {"instances": [{"text": "1"}]}
        wrong = (
            {}
            if model.version in self.wrong
            else {"label": "high", "probability": 0.8807970779778824}
        )
        return {"predictions": [wrong]}

    def split(self, shares, number):
        assert sum(shares.values()) == 100
        assert set(shares) <= self.versions
        self.shares, self.number = dict(shares), number

    def observe(self):
        assert self.shares
        found = {}
        for version in self.shares:
            errors = int(self.requests * self.fails.get(version, 0))
            counts = [0] * (len(BOUNDS_MS) + 1)
            refused = self.refuses.get(version, 0)
            counts[20] = self.requests - errors - refused
            found[version] = Traffic(self.requests, errors, tuple(counts), refused=refused)
        return found

    def retain(self, versions, number):
        assert set(self.shares) <= versions
        self.versions &= versions

    def delete(self):
        self.versions, self.shares = set(), {}


def model(version):
    return ServedModel(
        name="tickets",
        version=version,
        digest="d",
        path="p",
        evidence="",
        code="",
        columns=ColumnsSpec(),
        image_size=None,
    )


class World:
    def __init__(self, folder, spec=FAST):
        self.platform, self.folder, self.spec = Platform(), folder, spec

    def rollout(self, wait=True, shadow_of=""):
        log = RolloutLog(self.folder / "log", lambda event: None)
        before = model(shadow_of) if shadow_of else None
        return Rollout(self.platform, log, self.spec, wait, lambda event, traffic: None, before)

    def to(self, version, inputs, **spec):
        rollout = self.rollout(wait=False)
        rollout.inputs, rollout.spec = inputs, self.spec.model_copy(update=spec)
        return rollout.to(model(version))

    def states(self):
        return [event.state for event in self.rollout().log.events()]

    @property
    def end(self):
        last = self.rollout().log.last()
        return (last.state, serving(last), self.platform.shares, self.platform.versions)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_the_first_version_gets_all_requests_once_it_is_proven(world):
    world.rollout().to(model("1"))
    assert world.states() == ["create", "smoke", "live", "settled"]
    assert world.end == ("settled", "1", {"1": 100}, {"1"})


def test_the_next_one_gets_more_and_more_and_the_one_before_stays(world):
    for version in "123":
        world.rollout().to(model(version))
    events = world.rollout().log.events()
    shares = [event.shares for event in events if event.state == "canary" and event.version == "3"]
    assert shares == [{"3": 10, "2": 90}, {"3": 50, "2": 50}]
    assert world.end == ("settled", "3", {"3": 100}, {"2", "3"})


def test_too_few_requests_wait_and_the_next_call_goes_on(world):
    world.rollout().to(model("1"))
    world.platform.requests = 99
    for _ in range(3):
        assert world.rollout(wait=False).to(model("2")).shares == {"2": 10, "1": 90}
    world.platform.requests = 100
    assert world.rollout(wait=False).to(model("2")).state == "settled"


def test_a_step_lasts_its_minutes(world):
    world.spec = FAST.model_copy(update={"step_minutes": 60.0})
    world.rollout().to(model("1"))
    assert world.rollout(wait=False).to(model("2")).state == "canary"


def test_a_canary_that_fails_is_rolled_back_with_its_reason(world):
    world.rollout().to(model("1"))
    world.platform.fails = {"2": 0.2}
    event = world.rollout().to(model("2"))
    assert (event.state, event.version) == ("rolled_back", "2")
    assert "it failed 100 of 500 requests; 1.0% are allowed" in event.reason
    assert world.end == ("rolled_back", "1", {"1": 100}, {"1"})


@pytest.mark.parametrize("kind", [StorageError, UnreachableError])
def test_a_service_that_is_away_rolls_nothing_back_and_the_next_call_goes_on(world, kind):
    """A version is staged while it is created: a store that is away says nothing of it."""
    world.rollout().to(model("1"))
    world.platform.away = kind("the store is away")
    with pytest.raises(kind):
        world.rollout().to(model("2"))
    assert world.states()[-1] == "create"
    world.platform.away = None
    assert world.rollout().to(model("2")).state == "settled"
    assert world.end == ("settled", "2", {"2": 100}, {"1", "2"})


def test_a_version_that_answers_otherwise_than_it_was_judged_gets_no_requests(world, tmp_path):
    proven = own(tmp_path / "proven")
    world.rollout().to(dataclasses.replace(proven, version="1"))
    world.platform.wrong = {"2"}
    event = world.rollout().to(dataclasses.replace(proven, version="2"))
    assert (
        "to row 1 of its test split the model answers label None, and was judged by 'high'"
        in event.reason
    )
    assert world.states()[-4:] == ["create", "smoke", "roll_back", "rolled_back"]


def test_a_version_is_in_the_shadow_of_the_one_before_first(world):
    world.rollout().to(model("1"))
    world.spec = SHADOW
    world.platform.requests = 99
    for _ in range(2):
        assert world.rollout(False, "1").to(model("2")).state == "shadow"
        assert world.platform.shares == {"02": 20, "1": 80}
    with pytest.raises(RequestError, match="is 0, and a version is in the shadow"):
        world.rollout().to(model("2"))
    world.platform.requests, world.platform.seen["differed"] = 100, 4
    world.rollout(False, "1").to(model("2"))
    assert world.states()[-5:] == ["shadow", "create", "smoke", "live", "settled"]
    assert world.end == ("settled", "2", {"2": 100}, {"1", "2"})
    told = "of 100 requests in the shadow, 4 otherwise than the version before, 0 failed"
    assert told in [event.reason for event in world.rollout().log.events()]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"differed": 100}, "answered 20.0% of 500 requests otherwise; 5.0% are allowed"),
        ({"failed": 30}, "in the shadow it failed 30 of 500 requests"),
    ],
)
def test_who_answers_worse_in_the_shadow_is_not_seen_by_anybody(world, seen, reason):
    world.rollout().to(model("1"))
    world.spec = SHADOW
    world.platform.seen.update(seen)
    assert reason in world.rollout(True, "1").to(model("2")).reason
    assert world.states()[-3:] == ["shadow", "roll_back", "rolled_back"]
    assert world.end == ("rolled_back", "1", {"1": 100}, {"1"})


def test_a_version_that_is_asked_otherwise_is_refused_before_anything_is_done(world):
    world.to("1", "a text in the column body")
    before, calls = world.states(), len(world.platform.calls)
    with pytest.raises(RequestError) as caught:
        world.to("2", "a text in the column message")
    (problem,) = caught.value.problems
    assert problem.what == (
        "version 2 reads a text in the column message, and version 1, which answers now, reads a text in the column body: "
        "clients of today would be refused"
    )
    assert "--set deploy.allow_other_inputs=true" in problem.fix
    assert (world.states(), len(world.platform.calls)) == (before, calls)
    assert world.to("2", "a text in the column body").state == "settled"
    with pytest.raises(RequestError, match="gets the same requests"):
        world.to("3", "a chat in the column body", allow_other_inputs=True, shadow=10)
    assert world.to("3", "a chat in the column body", allow_other_inputs=True).state == "settled"
    with pytest.raises(RequestError, match="version 3, which answers now, reads a chat"):
        world.to("4", "a text in the column body")
    world.rollout().delete()
    assert world.to("5", "an image in the column body").state == "settled"


def test_a_deployment_of_an_earlier_release_does_not_say_how_it_is_asked(world):
    world.to("1", "")
    assert world.to("2", "a text in the column message").state == "settled"


def test_a_step_waits_for_requests_that_are_answered_and_not_refused(world):
    world.rollout().to(model("1"))
    world.platform.refuses = {"1": 450, "2": 450}
    assert world.rollout(wait=False).to(model("2")).state == "canary"
    world.platform.refuses = {"2": 450}
    reason = world.rollout(wait=False).to(model("2")).reason
    assert "it refused 450 of 500 requests (4xx), and the version before refused 0 of 500" in reason


def test_who_fails_as_often_as_the_one_before_is_not_worse(world):
    world.rollout().to(model("1"))
    world.platform.fails = {"1": 0.2, "2": 0.2}
    assert world.rollout().to(model("2")).state == "settled"


def test_a_version_that_never_starts_leaves_the_one_before_alone(world):
    world.rollout().to(model("1"))
    world.platform.broken = {"2"}
    assert world.rollout().to(model("2")).reason == "its image was not found"
    assert "split" in world.platform.calls
    assert world.end == ("rolled_back", "1", {"1": 100}, {"1"})


def test_a_first_version_that_never_starts_leaves_nothing_and_can_be_tried_again(world):
    world.platform.broken = {"1"}
    assert world.rollout().to(model("1")).state == "rolled_back"
    assert world.end == ("rolled_back", "", {}, set())
    world.platform.broken = set()
    assert world.rollout().to(model("1")).state == "settled"


def test_one_command_goes_back_in_any_state(world):
    world.rollout().to(model("1"))
    with pytest.raises(RequestError, match="there is no version before version 1"):
        world.rollout().back("slow")
    world.platform.requests = 1
    world.rollout(wait=False).to(model("2"))
    assert world.rollout().back("slow").reason == "slow"
    assert world.end == ("rolled_back", "1", {"1": 100}, {"1"})
    world.platform.requests = 500
    world.rollout().to(model("3"))
    world.rollout().back("slower")
    assert world.end == ("rolled_back", "1", {"1": 100}, {"1"})
    assert world.rollout().back("again").reason == "slower"


def test_another_champion_takes_over_from_a_canary(world):
    world.rollout().to(model("1"))
    world.platform.requests = 1
    world.rollout(wait=False).to(model("2"))
    world.platform.requests = 500
    assert world.rollout().to(model("3")).state == "settled"
    assert world.end == ("settled", "3", {"3": 100}, {"1", "3"})


def test_what_is_there_is_found(world):
    world.rollout().to(model("1"))
    before = world.states()
    world.platform.versions, world.platform.shares = set(), {}  # the machine was restarted
    world.rollout().to(model("1"))
    assert world.states() == before
    assert world.end == ("settled", "1", {"1": 100}, {"1"})


def test_of_two_commands_at_once_one_stops(world):
    slow = world.rollout()
    seen = slow.log.last()
    world.rollout().to(model("1"))
    with pytest.raises(RequestError, match="another command moved this deployment on meanwhile"):
        slow.log.put(seen, "create", "2", "")


def test_the_newest_entry_is_the_last_of_all(world):
    log, last = world.rollout().log, None
    for number in range(1, 40):
        assert log.last() == last
        last = log.put(last, "create", str(number), "")
    assert log.last().version == "39"
    assert [event.number for event in log.events()] == list(range(1, 40))


def test_a_number_that_the_registry_gave_out_again_is_another_model(world):
    world.rollout().to(model("1"))
    other = dataclasses.replace(model("1"), digest="other")
    with pytest.raises(
        RequestError, match="version 1 is another model, or has another precision, than the"
    ):
        world.rollout().to(other)
    world.rollout().delete()
    assert world.rollout().to(other).state == "settled"


STORIES = {
    "first": ((), "1", {}),
    "next": (("1",), "2", {}),
    "rolled back": (("1",), "2", {"2": 0.5}),
    "deleted": (("1", "2"), "", {}),
    "by hand": (("1", "2"), "back", {}),
}


def tell(world, story):
    """The command of a story, as often as it is killed."""
    target = STORIES[story][1]
    while True:
        try:
            rollout = world.rollout()
            if target == "":
                return rollout.delete()
            return rollout.back("slow") if target == "back" else rollout.to(model(target))
        except Killed:
            world.platform.kill = (0, "")


@pytest.mark.parametrize("story", STORIES)
def test_a_command_killed_before_or_after_any_call_is_completed_by_the_same_command(
    tmp_path, story
):
    before, _, fails = STORIES[story]

    def prepared(name):
        made = World(tmp_path / name)
        for version in before:
            made.rollout().to(model(version))
        made.platform.calls, made.platform.fails = [], fails
        return made

    plain = prepared("plain")
    tell(plain, story)
    calls = len(plain.platform.calls)
    assert calls >= 2 - (story == "deleted")
    for at in range(1, calls + 1):
        for when in ("before", "after"):
            world = prepared(f"{at}-{when}")
            world.platform.kill = (at, when)
            tell(world, story)
            assert world.platform.kill == (0, ""), "it was not killed"
            assert world.end == plain.end
            assert world.states() == plain.states()


def test_a_command_killed_before_or_after_any_entry_of_the_log_is_completed_too(world):
    plain = World(world.folder / "plain")
    for version in "12":
        plain.rollout().to(model(version))
    number = len(plain.states())
    for at in range(1, number + 1):
        for when in ("before", "after"):
            killed = World(world.folder / f"{at}-{when}")

            def rollout(killed=killed, at=at, when=when):
                made = killed.rollout()
                put = made.log.storage.put_new

                def put_new(path, content):
                    here = path == f"{at:06}.json"
                    if here and when == "before":
                        raise Killed
                    put(path, content)
                    if here:
                        raise Killed

                made.log.storage.put_new = put_new
                return made

            for version in "12":
                try:
                    rollout().to(model(version))
                except Killed:
                    killed.rollout().to(model(version))
            assert killed.end == plain.end
            assert killed.states() == plain.states()


def test_a_version_that_gets_no_requests_is_spoken_of_too(capsys):
    event = RolloutEvent(
        number=3,
        state="canary",
        version="2",
        previous="1",
        at="2026-11-26T17:00:00+00:00",
        shares={"2": 10, "1": 90},
        reason="",
        digest="",
    )
    show = traffic_printer(200)
    for requests, errors in ((0, 0), (3, 0), (12, 1), (13, 1), (24, 1)):
        show(event, Traffic(requests, errors, ()))
    assert capsys.readouterr().err.splitlines() == [
        "  canary: 0 of at least 200 requests",
        "  canary: 12 of at least 200 requests, 1 failed",
        "  canary: 24 of at least 200 requests, 1 failed",
    ]


def test_what_stood_is_counted_by_the_hour_of_each_version():
    """Version 1 alone for 1 h and then beside 2 for 3 h, of which 2 had a canary for 1 h; 3 is taken back after 1 h, in
    which three stood; then 2 alone for 2 h, and nothing any more."""
    told = [
        (0, "create", "1", ""),
        (1, "settled", "1", ""),
        (2, "create", "2", "1"),
        (3, "settled", "2", "1"),
        (5, "create", "3", "2"),
        (6, "roll_back", "3", "2"),
        (6, "rolled_back", "3", "2"),
        (8, "delete", "3", "2"),
        (8, "deleted", "3", "2"),
    ]
    events = [
        RolloutEvent(
            number=number,
            state=state,
            version=version,
            previous=previous,
            shares={},
            reason="",
            at=f"2026-11-28T{hour:02}:00:00.000+00:00",
        )
        for number, (hour, state, version, previous) in enumerate(told)
    ]
    end = datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.UTC)
    assert version_hours(events, end) == 2 * 1 + 3 * 2 + 1 * 3 + 2 * 1
    assert version_hours(events[:4], end) == 2 + (12 - 2) * 2
