"""The next starts of lines of cron in time zones, changing clocks included: on each platform, from the
expression that it gets, the same as croniter's for what the user wrote.

Where clocks change, platforms and croniter differ. croniter starts a time that the clock skips when
the clock goes on, and a time that it repeats twice. Kubeflow leaves the first out; AWS does, too,
and starts the second once; Vertex AI and Azure ML do not say. `CLOCKS` has each such start."""

from __future__ import annotations

import datetime as dt
import functools
import importlib
import itertools
import zoneinfo
from collections.abc import Callable, Iterable

import pytest

from rekindle.errors import UnsupportedError
from rekindle.platforms.azureml.schedule import azure_zone
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Lowered
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.spec.cron import cron_problem, next_times
from rekindle.spec.schedule import ScheduleSpec
from tests.platforms import crons

croniter = pytest.importorskip("croniter").croniter
PLATFORMS = ("azureml", "kubeflow", "sagemaker", "vertex")
ROWS = [
    ("0 3 * * *", "UTC"),
    ("0 3 * * 1", "UTC"),
    ("0 3 * * mon", "Europe/Berlin"),
    ("30 2 * * *", "Europe/Berlin"),
    ("0 2 * * *", "Europe/Berlin"),
    ("0 3 * * *", "Europe/Berlin"),
    ("0 * * * *", "Europe/Berlin"),
    ("*/30 1-3 * * *", "Europe/Berlin"),
    ("0 2 * * sun", "Europe/Berlin"),
    ("15 1 * * *", "Europe/London"),
    ("0 0 * * *", "Europe/London"),
    ("0 12 * * sat", "Europe/London"),
    ("30 1 * * *", "America/New_York"),
    ("30 2 * * 0", "America/New_York"),
    ("0 */2 * * *", "America/New_York"),
    ("0 9-17 * * mon-fri", "America/New_York"),
    ("45 23 * * 6", "America/Los_Angeles"),
    ("0 2 * * *", "America/Los_Angeles"),
    ("15 2 * * *", "Australia/Lord_Howe"),
    ("45 1 * * *", "Australia/Lord_Howe"),
    ("0 9 * * *", "Australia/Lord_Howe"),
    ("30 2 * * *", "Australia/Sydney"),
    ("0 4 * * 1-5", "Australia/Sydney"),
    ("0 3 * * *", "Asia/Kolkata"),
    ("*/15 * * * *", "Asia/Kolkata"),
    ("30 5 * * 0", "Asia/Kolkata"),
    ("0 6 * * *", "Asia/Kathmandu"),
    ("5/20 9-17/4 * * 1-5", "Asia/Tokyo"),
    ("0 0 * * sun,wed", "Asia/Tokyo"),
    ("30 2 * * *", "Africa/Casablanca"),
    ("0 3 * * *", "Africa/Casablanca"),
    ("0 5 * * fri", "Africa/Cairo"),
    ("0 */3 * * *", "Pacific/Auckland"),
    ("45 2 * * *", "Pacific/Chatham"),
    ("0 22 * * *", "Pacific/Chatham"),
    ("0 3 * * */2", "UTC"),
    ("0 0 * * 0", "UTC"),
    ("59 23 * * 6", "UTC"),
    ("* * * * *", "UTC"),
    ("0 3 1 * *", "UTC"),
    ("0 3 1,15 * *", "Europe/Berlin"),
    ("0 3 31 * *", "America/New_York"),
    ("0 3 29 2 *", "UTC"),
    ("0 3 */2 * *", "UTC"),
    ("30 6 1-7 jan,jul *", "Asia/Kolkata"),
    ("0 0 1 1 *", "Pacific/Auckland"),
    ("0 3 * 3 *", "Europe/Berlin"),
    ("10 5 28 3 *", "Europe/Berlin"),
    ("0 3 1 * 1", "UTC"),
    ("0 3 13 * fri", "Europe/London"),
    ("0 3 1-7 * sun", "America/New_York"),
    ("0 3 * * *", "America/Vancouver"),
    ("0 3 * * *", "America/Scoresbysund"),
]
DAYS = "ignores days of the month and months"
BOTH = "days of the month and of the week"
NAME = "no name for the time zone"
REFUSED = {
    "0 3 1 * *": {"azureml": DAYS},
    "0 3 1,15 * *": {"azureml": DAYS},
    "0 3 31 * *": {"azureml": DAYS},
    "0 3 29 2 *": {"azureml": DAYS},
    "0 3 */2 * *": {"azureml": DAYS},
    "30 6 1-7 jan,jul *": {"azureml": DAYS},
    "0 0 1 1 *": {"azureml": DAYS},
    "0 3 * 3 *": {"azureml": DAYS},
    "10 5 28 3 *": {"azureml": DAYS},
    "0 3 1 * 1": {"azureml": DAYS, "sagemaker": BOTH, "vertex": BOTH},
    "0 3 13 * fri": {"azureml": DAYS, "sagemaker": BOTH, "vertex": BOTH},
    "0 3 1-7 * sun": {"azureml": DAYS, "sagemaker": BOTH, "vertex": BOTH},
    "America/Vancouver": {"azureml": NAME},
    "America/Scoresbysund": {"azureml": NAME},
}
# row: what croniter starts for a time that the clock skips; the first, and the second, start at a time
# that it repeats; all in UTC
CLOCKS = {
    ("30 2 * * *", "Europe/Berlin"): (
        {"2027-03-28T01:00"},
        {"2027-10-31T00:30"},
        {"2027-10-31T01:30"},
    ),
    ("0 2 * * *", "Europe/Berlin"): (
        {"2027-03-28T01:00"},
        {"2027-10-31T00:00"},
        {"2027-10-31T01:00"},
    ),
    ("0 * * * *", "Europe/Berlin"): ((), {"2027-10-31T00:00"}, {"2027-10-31T01:00"}),
    ("*/30 1-3 * * *", "Europe/Berlin"): (
        (),
        {"2027-10-31T00:00", "2027-10-31T00:30"},
        {"2027-10-31T01:00", "2027-10-31T01:30"},
    ),
    ("0 2 * * sun", "Europe/Berlin"): (
        {"2027-03-28T01:00", "2028-03-26T01:00"},
        {"2027-10-31T00:00"},
        {"2027-10-31T01:00"},
    ),
    ("15 1 * * *", "Europe/London"): (
        {"2027-03-28T01:00"},
        {"2027-10-31T00:15"},
        {"2027-10-31T01:15"},
    ),
    ("30 1 * * *", "America/New_York"): ((), {"2027-11-07T05:30"}, {"2027-11-07T06:30"}),
    ("30 2 * * 0", "America/New_York"): ({"2027-03-14T07:00", "2028-03-12T07:00"}, (), ()),
    ("0 */2 * * *", "America/New_York"): ({"2027-03-14T07:00"}, (), ()),
    ("0 2 * * *", "America/Los_Angeles"): ({"2027-03-14T10:00"}, (), ()),
    ("15 2 * * *", "Australia/Lord_Howe"): ({"2027-10-02T15:30"}, (), ()),
    ("45 1 * * *", "Australia/Lord_Howe"): ((), {"2027-04-03T14:45"}, {"2027-04-03T15:15"}),
    ("30 2 * * *", "Australia/Sydney"): (
        {"2027-10-02T16:00"},
        {"2027-04-03T15:30"},
        {"2027-04-03T16:30"},
    ),
    ("30 2 * * *", "Africa/Casablanca"): (
        {"2027-03-14T02:00"},
        {"2027-02-07T01:30", "2028-01-23T01:30"},
        {"2027-02-07T02:30", "2028-01-23T02:30"},
    ),
    ("45 2 * * *", "Pacific/Chatham"): (
        {"2027-09-25T14:00"},
        {"2027-04-03T13:00"},
        {"2027-04-03T14:00"},
    ),
}
# where a clock changes by half an hour, between full hours, or at midnight, Kubeflow's cron counts in
# whole hours and loses its way that day: starts that it leaves out, and one that it adds
LOST_ON_KUBEFLOW = {
    ("15 2 * * *", "Australia/Lord_Howe"): ({"2027-04-03T15:45", "2027-10-02T15:30"}, ()),
    ("45 1 * * *", "Australia/Lord_Howe"): ((), {"2027-10-02T15:45"}),
    ("0 9 * * *", "Australia/Lord_Howe"): ({"2027-04-03T22:30", "2027-10-02T22:00"}, ()),
    ("0 5 * * fri", "Africa/Cairo"): ({"2027-04-30T02:00", "2028-04-28T02:00"}, ()),
    ("45 2 * * *", "Pacific/Chatham"): ({"2027-04-03T14:00"}, ()),
}
PLACES = {
    "azureml": AzureMLSpec(),
    "sagemaker": SageMakerSpec(),
    "vertex": VertexSpec(),
}


def lowered(platform: str, cron: str, zone: str) -> Lowered:
    """As the platform has it; on Kubeflow in a cluster whose controller has that clock."""
    place = PLACES.get(platform) or KubeflowSpec(timezone=zone)
    module = importlib.import_module(f"rekindle.platforms.{platform}.schedule")
    found: Lowered = module.lowered(ScheduleSpec(cron=cron, timezone=zone), place)
    return found


@functools.cache
def windows(zone: str) -> list[dt.datetime]:
    """Moments to look on from: ordinary ones, and shortly and some days before the clock changes."""
    begin, hour = dt.datetime(2027, 1, 1, tzinfo=dt.UTC), dt.timedelta(hours=1)
    there = zoneinfo.ZoneInfo(zone)
    changes = [
        at
        for at in (begin + hour * n for n in range(400 * 24))
        if at.astimezone(there).utcoffset() != (at + hour).astimezone(there).utcoffset()
    ]
    return [begin, begin + hour * 9000.5, *(at - hour * h for at in changes for h in (4.5, 60))]


def differs(platform: str, row: tuple[str, str]) -> tuple[set[str], set[str]]:
    """What croniter starts and the platform does not, and the other way round."""
    skipped, first, second = (set(starts) for starts in CLOCKS.get(row, ((), (), ())))
    if platform == "kubeflow":
        lost, more = LOST_ON_KUBEFLOW.get(row, (skipped, ()))
        return set(lost), set(more)
    unsaid = first if platform in ("azureml", "vertex") else set()
    return skipped | second | unsaid, set()


def compared(
    row: tuple[str, str], starts: Callable[[dt.datetime], Iterable[dt.datetime]]
) -> tuple[set[str], set[str]]:
    """What of its next twenty starts from each window only croniter has, and only `starts`."""
    lost, more = set[dt.datetime](), set[dt.datetime]()
    for moment in windows(row[1]):
        walk = croniter(row[0], moment.astimezone(zoneinfo.ZoneInfo(row[1]))).all_next(dt.datetime)
        wanted = [at.astimezone(dt.UTC) for at in itertools.islice(walk, 20)]
        found = list(itertools.islice(starts(moment), 20))
        end = min(wanted[-1], found[-1])
        both = [{at for at in side if at <= end} for side in (wanted, found)]
        lost |= both[0] - both[1]
        more |= both[1] - both[0]
    said = [{f"{at:%Y-%m-%dT%H:%M}" for at in side} for side in (lost, more)]
    return said[0], said[1]


# every third row is quick
QUICK = [
    pytest.param(row, marks=pytest.mark.slow if number % 3 else ())
    for number, row in enumerate(ROWS)
]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("row", QUICK, ids=" ".join)
def test_a_platform_starts_what_the_line_says_when_croniter_does_but_for_changing_clocks(
    row: tuple[str, str], platform: str
) -> None:
    if says := {**REFUSED.get(row[0], {}), **REFUSED.get(row[1], {})}.get(platform):
        with pytest.raises(UnsupportedError, match=says) as caught:
            lowered(platform, *row)
        assert all(problem.fix for problem in caught.value.problems)
        return
    there = lowered(platform, *row)
    found = compared(
        row, lambda moment: crons.after(platform, there.expression, there.timezone, moment)
    )
    assert found == differs(platform, row)


@pytest.mark.parametrize("row", QUICK, ids=" ".join)
def test_what_is_shown_before_is_what_croniter_has_but_for_changing_clocks(
    row: tuple[str, str],
) -> None:
    def shown(moment: dt.datetime) -> list[dt.datetime]:
        return [at.astimezone(dt.UTC) for at in next_times(*row, moment, 20)]

    skipped, _, second = (set(starts) for starts in CLOCKS.get(row, ((), (), ())))
    assert compared(row, shown) == (skipped | second, set())


def test_the_table_has_what_it_is_to_prove() -> None:
    assert len(ROWS) == len(set(ROWS)) >= 40
    assert {zone for _, zone in ROWS} >= {
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "Asia/Kolkata",
        "Africa/Casablanca",
    }
    assert all(cron_problem(cron) is None for cron, _ in ROWS)
    assert set(CLOCKS) | set(LOST_ON_KUBEFLOW) <= set(ROWS), "no exception without its row"


def test_a_longest_line_fits_what_aws_takes() -> None:
    longest = "1-59/2,0-58/3 1-23/2,0-22/3 1-31/2,2-30/3 1-12/2,2-12/3 *"
    assert len(lowered("sagemaker", longest, "UTC").expression) <= 256


def test_the_zones_of_a_name_of_windows_have_one_clock() -> None:
    """A zone whose clock has left that of its row would start at another hour than it says."""
    begin, there = (
        dt.datetime(2026, 11, 22, tzinfo=dt.UTC),
        dict[str, dict[str, tuple[object, ...]]](),
    )
    for zone in sorted(zoneinfo.available_timezones()):
        if name := azure_zone(zone):
            clock = zoneinfo.ZoneInfo(zone)
            there.setdefault(name, {})[zone] = tuple(
                (begin + dt.timedelta(hours=12 * n)).astimezone(clock).utcoffset()
                for n in range(1460)
            )
    assert {name for name, among in there.items() if len(set(among.values())) > 1} == set()
    for name, zone in crons.WINDOWS.items():
        assert zone in there[name] or azure_zone(zone) == name
