"""The planner's times, corrected by trainings that were measured.

A measured training says one number: its seconds a step over those that the model predicted. On the
rows of tests/plan/rows, where one row of a stack and GPU corrected and the others judged, a factor
on the whole step did better than one on computing alone: what a software hides of its communication
differs as much as its kernels do. The order of layouts stays as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

from rekindle.answers import Calibration
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import Profile, profile_of, spread_of, stamp
from rekindle.plan.search import Option
from rekindle.plan.steptime import StepTime
from rekindle.plan.work import Work


def job_of(work: Work, cluster: Cluster) -> str:
    """What two trainings share that take as long: the work of every rank, and the machines."""
    machines = cluster.gpu.name, cluster.gpus_per_node, cluster.nodes
    return hashlib.sha256(repr((work, machines)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Measured trainings. Those that were predicted with other constants than those of now do not
    count: they have to be measured against the new ones."""

    measured: Sequence[Calibration] = ()

    def profile(self, gpu: str, compiled: bool) -> Profile:
        """What is known of all trainings there."""
        known = self._of(gpu, compiled)
        if not known:
            return profile_of(gpu, compiled)
        factor = math.exp(sum(math.log(one.ratio) for one in known) / len(known))
        runs = ", ".join(one.run_id for one in known[-3:])
        basis = f"measured on {gpu} in {runs}: {factor:.2f} times the seconds of published rows"
        spread = spread_of("calibrated")
        plain = profile_of(gpu, compiled)
        return dataclasses.replace(plain, spread=spread, basis=basis, factor=factor)

    def applied(self, option: Option) -> Option:
        """The option at the speed that was measured, if anything was: of the same work the seconds
        themselves, whatever the model says, because data are shorter than they may be."""
        gpu, compiled = option.cluster.gpu.name, option.work.compile
        job = job_of(option.work, option.cluster)
        same = [one for one in self.measured if one.job == job]
        profile = self.profile(gpu, compiled)
        if same:
            last = same[-1]
            basis = f"measured in {last.run_id}, the same work on such machines"
            factor = last.measured / option.step.seconds
            profile = dataclasses.replace(
                profile, spread=spread_of("same_job"), basis=basis, factor=factor
            )
        if profile.factor == 1.0:
            return option
        terms = {name: profile.factor * s for name, s in option.step.terms.items()}
        return dataclasses.replace(option, step=StepTime(terms), profile=profile)

    def stale(self, gpu: str, compiled: bool) -> tuple[str, ...]:
        """Runs that were measured against other constants."""
        there = [one for one in self.measured if (one.gpu, one.compiled) == (gpu, compiled)]
        return tuple(one.run_id for one in there if one.constants != stamp())

    def _of(self, gpu: str, compiled: bool) -> list[Calibration]:
        now = stamp()
        return [
            one for one in self.measured
            if (one.gpu, one.compiled, one.constants) == (gpu, compiled, now)
        ]  # fmt: skip
