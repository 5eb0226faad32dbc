"""Measure a job: gradients and local trainings on every replica, from the first and from a trained version.

Every distance is the validator's own (validator/agreement.py), of updates as the job's codec leaves them; a liar is
measured by its gradients or deltas alone, since metrics are easily made up. Each microtask is compared pair by pair.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from apps.gradient.checkpoint import Checkpoint
from boinc_project.calibration.record import Calibration, LocalSteps, binding
from boinc_project.calibration.replicas import Replica, Replicas, replicas, threads_kept
from boinc_project.calibration.spread import FARTHEST, LIMIT, Band, NoiseMeter, band, largest_steps
from boinc_project.calibration.workbench import NotFinite, Tensors, Trail, Workbench
from boinc_project.job_config import JobError
from validator.agreement import tensor_distances
from work_generator.export import ExportedJob
from work_generator.job import Job

Tell = Callable[[str], None]
HALF = "half of the work, doubled"
SEARCHED = 3  # replicas that are followed to the largest number of local steps


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    microtasks  of each version
    warm_up     optimizer steps from the first version to the trained one; 0: the first version only
    max_steps   the most local steps that are tried
    """

    microtasks: int = 3
    warm_up: int = 100
    max_steps: int = 500


@dataclass
class _Collected:
    """Distances of one kind of update: of honest pairs by tensor, of lies, and the widest pairs of each version."""

    honest: list[Mapping[str, float]] = field(default_factory=list)
    lies: dict[str, list[float]] = field(default_factory=dict)
    drifts: list[tuple[float, int, Mapping[frozenset[int], float]]] = field(default_factory=list)

    def add_honest(self, copies: Sequence[Tensors]) -> None:
        self.honest += [tensor_distances(a, b) for a, b in itertools.combinations(copies, 2)]

    def add_lie(self, name: str, copies: Sequence[Tensors], lie: Tensors | None) -> None:
        """The lie's least distance to an honest copy; None: it came to nothing finite."""
        family = "delta/" if any(each.startswith("delta/") for each in copies[0]) else "gradient/"
        distances = [FARTHEST]
        for copy in copies if lie is not None else ():
            assert lie is not None
            names = [each for each in copy if each.startswith(family)]
            told = tensor_distances({n: copy[n] for n in names}, {n: lie[n] for n in names})
            distances.append(max(told.values(), default=0.0))
        self.lies.setdefault(name, []).append(min(distances))

    def band(self, steps: int) -> Band:
        return band(steps, self.honest, self.lies)


def measure(job: Job, exported: ExportedJob, effort: Effort, tell: Tell) -> Calibration:
    """Measure the job. Raises JobError if its loss does not stay finite."""
    bench = Workbench.of(job, exported)
    with threads_kept():
        tell("looking for backends")
        ways = replicas(bench.random_numbers)
        try:
            return _calibration(job, exported, bench, ways, effort, tell)
        except NotFinite as error:
            raise JobError(
                f"the job cannot be calibrated: {error}; lower the learning rate, or set max_norm in [inner_optimizer]"
            ) from error


def _calibration(
    job: Job, exported: ExportedJob, bench: Workbench, ways: Replicas, effort: Effort, tell: Tell
) -> Calibration:
    fastest = ways.honest[1]
    states: dict[str, Tensors] = {"version 0": exported.state}
    if effort.warm_up:
        tell(f"training {effort.warm_up} steps")
        states[f"after {effort.warm_up} steps"] = bench.trained(fastest, exported.state, effort.warm_up)
    meter = NoiseMeter()
    gradient = _gradients(bench, ways, list(states.values()), effort.microtasks, meter, tell)
    delta = found = None
    if job.config.inner_optimizer is not None:
        steps = job.config.train.local_steps
        collected = _deltas(bench, ways, list(states.values()), min(effort.microtasks, 2), steps, tell)
        delta = collected.band(steps)
        found = _search(bench, ways, list(states.values()), collected, effort.max_steps, tell)
    return Calibration(
        job=job.config.job.name,
        bound_to=binding(job.config, exported.gradient, exported.optimizer),
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        software=_software(ways),
        replicas=tuple(each.name for each in ways.honest),
        absent=ways.absent,
        versions=tuple(states),
        gradient=gradient,
        delta=delta,
        noise=tuple(meter.found()),
        local_steps=found,
    )


def _software(ways: Replicas) -> dict[str, str]:
    """Versions and devices of the backends."""
    found: dict[str, str] = {}
    for each in ways.honest:
        about = each.open().describe()
        for key in ("numpy", "torch", "pyopencl"):
            if key in about:
                found[key] = str(about[key])
        if about.get("device", "cpu") != "cpu":
            found[each.name] = str(about["device"])
    return found


def _gradients(
    bench: Workbench, ways: Replicas, states: Sequence[Tensors], microtasks: int, meter: NoiseMeter, tell: Tell
) -> Band:
    """Gradient microtasks of the job's size (of one batch if its volunteers take local steps)."""
    batches = bench.config.train.batches_per_microtask
    collected = _Collected()
    for (version, state), slot in itertools.product(enumerate(states), range(microtasks)):
        judged = partial(bench.judged, "gradient", version=version, slot=slot)
        copies = []
        for replica in ways.honest:
            tell(f"gradient {version * microtasks + slot + 1} of {len(states) * microtasks} on {replica.name}")
            copies.append(bench.gradient(replica, state, version, slot, batches))
        meter.add(copies)
        copies = [judged(each, batches) for each in copies]
        collected.add_honest(copies)
        for replica in ways.imprecise:
            tell(f"gradient in {replica.name}")
            made = _finite(partial(bench.gradient, replica, state, version, slot, batches))
            collected.add_lie(replica.name, copies, None if made is None else judged(made, batches))
        half = bench.half_of_the_gradient(ways.honest[1], state, version, slot, batches)
        collected.add_lie(HALF, copies, judged(half, max(1, batches // 2)))
    return collected.band(batches)


def _finite(compute: Callable[[], Tensors]) -> Tensors | None:
    try:
        return compute()
    except NotFinite:
        return None


def _deltas(
    bench: Workbench, ways: Replicas, states: Sequence[Tensors], microtasks: int, steps: int, tell: Tell
) -> _Collected:
    """Local trainings of the job's own number of steps."""
    collected = _Collected()
    fastest = ways.honest[1]
    for (version, state), slot in itertools.product(enumerate(states), range(microtasks)):
        judged = partial(bench.judged, "local-steps", version=version, slot=slot)
        plain = []
        half: Tensors | None = None

        def trained(replica: Replica, state: Tensors = state, version: int = version, slot: int = slot) -> Trail:
            tell(f"{steps} local steps on {replica.name}, from version {version}")
            return bench.trail(replica, state, version, slot, steps)

        for replica in ways.honest:
            trail = trained(replica)
            if replica is fastest and steps > 1:
                trail.advance(steps // 2)
                half = trail.update(steps / (steps // 2))
            trail.advance(steps)
            plain.append(trail.update())
        copies = [judged(each, steps) for each in plain]
        collected.add_honest(copies)
        for replica in ways.imprecise:
            made = _finite(partial(_end, trained(replica), steps))
            collected.add_lie(replica.name, copies, None if made is None else judged(made, steps))
        if half is not None:
            collected.add_lie(HALF, copies, judged(half, steps // 2))
        drift = {
            frozenset((i, j)): max(tensor_distances(plain[i], plain[j]).values())
            for i, j in itertools.combinations(range(len(plain)), 2)
        }
        collected.drifts.append((max(drift.values()), version, drift))
    return collected


def _end(trail: Trail, steps: int) -> Tensors:
    trail.advance(steps)
    return trail.update()


def _search(
    bench: Workbench, ways: Replicas, states: Sequence[Tensors], collected: _Collected, bound: int, tell: Tell
) -> LocalSteps:
    """The largest number of local steps, followed on the replicas and from the version that parted most."""
    _, version, drift = max(collected.drifts, key=lambda each: each[:2])
    chosen = [ways.honest[i] for i in farthest(drift, len(ways.honest), SEARCHED)]

    def search(name: str, judged: Callable[[Tensors, int], Tensors]) -> int:
        trails: list[Trail] = []
        marks: list[Checkpoint] = []

        def within(steps: int, last: int) -> bool:
            nonlocal trails, marks
            tell(f"{steps} local steps{name}")
            if not last:
                trails = [bench.trail(replica, states[version], version, 0, bound) for replica in chosen]
            elif trails[0].step > last:
                for trail, mark in zip(trails, marks, strict=True):
                    trail.back(mark)
            updates = []
            for trail in trails:
                trail.advance(steps)
                updates.append(judged(trail.update(), steps))
            pairs = itertools.combinations(updates, 2)
            if any(apart > LIMIT for a, b in pairs for apart in tensor_distances(a, b).values()):
                return False
            marks = [trail.mark() for trail in trails]
            return True

        return largest_steps(within, bound)

    with_codec = search("", partial(bench.judged, "local-steps", version=version, slot=0))
    plain = with_codec
    if bench.config.codec.kind != "dense":
        plain = search(" before the codec", lambda tensors, steps: tensors)
    return LocalSteps(with_codec, plain, bound, tuple(each.name for each in chosen))


def farthest(drift: Mapping[frozenset[int], float], count: int, wanted: int) -> list[int]:
    """Numbers of the `wanted` copies that are farthest apart: the widest pair, then always the one farthest from those
    chosen; the smaller number first where distances are equal."""
    pair = max(drift, key=lambda each: (drift[each], [-i for i in sorted(each)]))
    chosen = sorted(pair)
    while len(chosen) < min(wanted, count):
        rest = [i for i in range(count) if i not in chosen]
        chosen.append(max(rest, key=lambda i: (max(drift[frozenset((i, j))] for j in chosen), -i)))
    return chosen
