"""The planner's times, corrected by trainings that were measured.

A measured training says one number: its seconds a step over those that the model
predicted. On the rows of tests/plan/rows a factor on the whole step did better than one
on computing alone. The order of layouts stays as it is."""

import dataclasses
import hashlib
import math
from collections.abc import Sequence

from rekindle.outputs import Calibration
from rekindle.plan.cluster import Cluster
from rekindle.plan.constants import CPU, Calibrated, profile_of, spread_of, stamp
from rekindle.plan.search import Option
from rekindle.plan.steptime import StepTime
from rekindle.plan.work import Work


def job_of(work: Work, cluster: Cluster) -> str:
    """What two trainings share that take as long: the work of every rank,
    and the machines."""
    # `repr` of frozen dataclasses of numbers and names is the same in every process
    machines = cluster.gpu.name, cluster.gpus_per_node, cluster.nodes
    return hashlib.sha256(repr((work, machines)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Measured trainings.
    Those that were predicted with other constants than now do not count."""

    measured: Sequence[Calibration] = ()

    def profile(self, gpu: str, compiled: bool, engine: str) -> Calibrated:
        """The profile of a GPU, corrected by what was measured on it."""
        published = profile_of(gpu, compiled, engine)
        current = [run for run in self._like(gpu, compiled, engine) if run.constants == stamp()]
        if not current:
            return published
        # the geometric mean: twice as fast and half as fast cancel out
        factor = math.exp(sum(math.log(run.ratio) for run in current) / len(current))
        runs = ", ".join(run.run_id for run in current[-3:])
        basis = f"measured on {gpu} in {runs}: {factor:.2f} times what was predicted"
        return dataclasses.replace(
            published,
            spread=spread_of("calibrated"),
            basis=basis,
            factor=factor,
            guessed=gpu == CPU,
        )

    def applied(self, options: Sequence[Option]) -> list[Option]:
        """Layouts on the same machines at the speed that was measured. Work that was
        measured takes what it took; what that did to the prediction, it does to the other
        layouts, too."""
        if not options or not self.measured:
            return list(options)
        calibrations = {run.job: run for run in self.measured}
        same_jobs = [calibrations.get(job_of(option.work, option.cluster)) for option in options]
        work = options[0].work
        profile = self.profile(options[0].cluster.gpu.name, work.compile, work.engine)
        measured_sequence = 0
        for option, same_job in zip(options, same_jobs, strict=True):
            if same_job is not None:
                factor = same_job.measured / option.step.seconds
                profile = dataclasses.replace(profile, factor=factor)
                measured_sequence = same_job.sequence
                break
        corrected = []
        for option, same_job in zip(options, same_jobs, strict=True):
            own_profile = profile
            if same_job is not None:
                own_profile = dataclasses.replace(
                    profile,
                    spread=spread_of("same_job"),
                    basis=f"measured in {same_job.run_id}, the same work on such machines",
                    factor=same_job.measured / option.step.seconds,
                    guessed=True,
                )
            terms = option.step.terms.items()
            step = StepTime({name: own_profile.factor * seconds for name, seconds in terms})
            corrected.append(
                dataclasses.replace(
                    option,
                    step=step,
                    profile=own_profile,
                    measured_sequence=measured_sequence,
                )
            )
        return corrected

    def stale(self, gpu: str, compiled: bool, engine: str) -> tuple[str, ...]:
        """Runs that were measured against other constants."""
        runs = self._like(gpu, compiled, engine)
        return tuple(run.run_id for run in runs if run.constants != stamp())

    def _like(self, gpu: str, compiled: bool, engine: str) -> list[Calibration]:
        """Trainings on the same GPU with the same software."""
        key = gpu, compiled, engine
        return [run for run in self.measured if (run.gpu, run.compiled, run.engine) == key]


@dataclasses.dataclass(frozen=True)
class Known:
    """What earlier runs told: speeds,
    and how many examples an epoch had in `counted_in`."""

    speeds: Speeds = dataclasses.field(default_factory=Speeds)
    examples: int | None = None
    counted_in: str = ""
