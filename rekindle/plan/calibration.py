"""The planner's times, corrected by trainings that were measured.

A measured training says one number: its seconds a step over those that the model predicted. On the
rows of tests/plan/rows a factor on the whole step did better than one on computing alone. The order
of layouts stays as it is."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence

from rekindle.outputs import Calibration
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU, Profile, profile_of, spread_of, stamp
from rekindle.plan.search import Option
from rekindle.plan.steptime import StepTime
from rekindle.plan.work import Work


def job_of(work: Work, cluster: Cluster) -> str:
    """What two trainings share that take as long: the work of every rank, and the machines."""
    machines = cluster.gpu.name, cluster.gpus_per_node, cluster.nodes
    return hashlib.sha256(repr((work, machines)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Measured trainings. Those that were predicted with other constants than now do not count."""

    measured: Sequence[Calibration] = ()

    def profile(self, gpu: str, compiled: bool, engine: str) -> Profile:
        plain = profile_of(gpu, compiled, engine)
        known = [one for one in self._like(gpu, compiled, engine) if one.constants == stamp()]
        if not known:
            return plain
        factor = math.exp(sum(math.log(one.ratio) for one in known) / len(known))
        runs = ", ".join(one.run_id for one in known[-3:])
        basis = f"measured on {gpu} in {runs}: {factor:.2f} times what was predicted"
        return dataclasses.replace(
            plain, spread=spread_of("calibrated"), basis=basis, factor=factor, guessed=gpu == CPU
        )

    def applied(self, options: Sequence[Option]) -> list[Option]:
        """Layouts on the same machines at the speed that was measured. Work that was measured takes
        what it took; what that did to the prediction, it does to the other layouts, too."""
        if not options or not self.measured:
            return list(options)
        took = {one.job: one for one in self.measured}
        pairs = [(o, took.get(job_of(o.work, o.cluster))) for o in options]
        work = options[0].work
        profile = self.profile(options[0].cluster.gpu.name, work.compile, work.engine)
        met_at = [(job.measured / o.step.seconds, job.sequence) for o, job in pairs if job]
        factor, met = met_at[0] if met_at else (profile.factor, 0)
        profile = dataclasses.replace(profile, factor=factor)
        found = []
        for option, job in pairs:
            known = profile
            if job:
                basis = f"measured in {job.run_id}, the same work on such machines"
                known = dataclasses.replace(
                    profile,
                    spread=spread_of("same_job"),
                    basis=basis,
                    factor=job.measured / option.step.seconds,
                    guessed=True,
                )
            step = StepTime({name: known.factor * s for name, s in option.step.terms.items()})
            found.append(dataclasses.replace(option, step=step, profile=known, met=met))
        return found

    def stale(self, gpu: str, compiled: bool, engine: str) -> tuple[str, ...]:
        """Runs that were measured against other constants."""
        there = self._like(gpu, compiled, engine)
        return tuple(one.run_id for one in there if one.constants != stamp())

    def _like(self, gpu: str, compiled: bool, engine: str) -> list[Calibration]:
        key = gpu, compiled, engine
        return [one for one in self.measured if (one.gpu, one.compiled, one.engine) == key]


@dataclasses.dataclass(frozen=True)
class Known:
    """What earlier runs told: speeds, and how many examples an epoch had in `counted_in`."""

    speeds: Speeds = dataclasses.field(default_factory=Speeds)
    examples: int | None = None
    counted_in: str = ""
