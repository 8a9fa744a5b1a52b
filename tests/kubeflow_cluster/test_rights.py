"""The suite runs with the least rights: those of rbac.yaml, beside what KFP gives."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.errors import RekindleError
from rekindle.ir.compile import compile_function
from tests.kubeflow_cluster import steps
from tests.kubeflow_cluster.cluster import Suite

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TRAINER, ARGO = "trainer.kubeflow.org", "argoproj.io"
# (account, verb, group, resource): whether it may
RIGHTS = {
    ("launcher", "create", TRAINER, "trainjobs"): True,
    ("launcher", "delete", TRAINER, "trainjobs"): True,
    ("launcher", "list", "", "events"): True,
    ("launcher", "patch", TRAINER, "trainjobs"): False,
    ("launcher", "delete", "", "secrets"): False,
    ("node", "get", ARGO, "workflows"): True,
    ("node", "delete", TRAINER, "trainjobs"): False,
    ("node", "list", "", "pods"): False,
    ("node", "get", "", "secrets"): False,
}


def may(suite: Suite, account: str, verb: str, group: str, resource: str) -> bool:
    """What the API server says an account may do in the namespace."""
    namespace = suite.options.namespace
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": resource}
    review: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{namespace}:{account}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "resourceAttributes": attributes,
        },
    }
    answer = suite.api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_accounts_may_do_what_they_need_and_no_more(trainer: Suite) -> None:
    accounts = {"launcher": trainer.place.service_account, "node": trainer.place.node_account}
    try:
        found = {right: may(trainer, accounts[right[0]], *right[1:]) for right in RIGHTS}
    except RekindleError as error:
        pytest.skip(f"this user may not ask what accounts may do: {error}")
    assert found == RIGHTS


def test_doctor_finds_what_a_run_needs(trainer: Suite) -> None:
    config = trainer.config(compile_function(steps.holding), {"seconds": 1})
    trainer.rekindle("doctor", config, "--platform", "kubeflow")
