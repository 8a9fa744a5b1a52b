"""Every platform is a class of the seam with a section, a column of the feature table and the abilities that it says; mypy
compares the signatures."""

from pathlib import Path

import pytest

import rekindle.catalog
from rekindle.catalog.tables import Carried, feature_rows
from rekindle.errors import RequestError
from rekindle.platforms.api import (
    DeploysModels,
    Platform,
    PublishesModels,
    RaisesAlarms,
    SchedulesPipelines,
    alarms_of,
    endpoint_of,
    names_with,
    platform_class,
    platform_of,
    publisher_of,
    schedules_of,
)
from rekindle.spec.deploy import DeploySpec
from rekindle.spec.installed import installed_platforms, platform_names
from rekindle.spec.platforms import PlatformsSpec
from rekindle.tables import rows

CATALOG = Path(rekindle.catalog.__path__[0])
ALL = ("azureml", "kubeflow", "sagemaker", "vertex")


class Bare(Platform):
    """A platform that runs pipelines and no more."""

    name = "bare"


Bare.__abstractmethods__ = frozenset()


def test_ours_are_installed_and_none_is_left_out():
    assert platform_names() == ALL
    assert installed_platforms().left_out == ()


@pytest.mark.parametrize("name", ALL)
def test_a_platform_has_its_section_and_its_name(name):
    chosen_class = platform_class(name)
    assert issubclass(chosen_class, Platform)
    platform = platform_of(name, PlatformsSpec())
    assert type(platform.settings) is chosen_class.section
    assert f"platforms.{platform.name}" == platform.settings.PATH == f"platforms.{name}"


@pytest.mark.parametrize("name", ALL)
def test_its_column_judges_known_features_and_all_of_them(name):
    column = platform_class(name).features()
    assert column.keys() <= feature_rows().keys()
    # those in how values flow are native where a column says nothing
    dataflow = rows(CATALOG / "dataflow.yaml").keys()
    assert column.keys() >= feature_rows().keys() - dataflow
    for row in feature_rows().values():
        assert isinstance(row.on[name], Carried)


def test_which_platform_can_do_what():
    assert names_with(SchedulesPipelines) == ALL
    assert names_with(DeploysModels) == ALL
    assert names_with(RaisesAlarms) == ALL
    assert names_with(PublishesModels) == ("azureml", "sagemaker", "vertex")


def test_what_a_platform_cannot_do_is_refused_by_name_with_what_to_do_instead():
    bare = Bare(PlatformsSpec().section("kubeflow"))
    refused = {
        "bare has no schedules": lambda: schedules_of(bare),
        "models are not deployed to bare": lambda: endpoint_of(bare, DeploySpec(), "tickets"),
        "rekindle writes no alarms for bare": lambda: alarms_of(bare),
        "bare has no model registry": lambda: publisher_of(bare, "tickets"),
    }
    for message, ask in refused.items():
        with pytest.raises(RequestError, match=message) as caught:
            ask()
        assert caught.value.problems[0].fix


def test_a_platform_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(RequestError, match="there is no platform `slurm`") as caught:
        platform_of("slurm", PlatformsSpec())
    assert caught.value.problems[0].fix == "one of azureml, kubeflow, sagemaker, vertex"


@pytest.mark.parametrize("name", sorted({*ALL} - {"kubeflow"}))
def test_a_limit_that_nothing_measures_is_refused(name):
    with pytest.raises(RequestError, match=r"deploy\.max_p99_ms"):
        endpoint_of(platform_of(name, PlatformsSpec()), DeploySpec(max_p99_ms=250), "tickets")
