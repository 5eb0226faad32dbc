"""From a slot of a model version to a microtask, its files and its workunit row.

The resources that BOINC is told:
    rsc_fpops_est     the microtask's operations, and what starting the application costs
    rsc_fpops_bound   generous: a host that overstates its speed a thousandfold must still have time (field
                      reports tell of good tasks killed within seconds by a tight bound)
    rsc_memory_bound  1.5 times the estimate, program included
    rsc_disk_bound    inputs, three checkpoints, the output, and the room in which the application unpacks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from boinc_project import templates
from boinc_project.contract.codecs import Part
from boinc_project.contract.microtask import (
    CONSTANTS_FILE,
    GRAPH_FILE,
    MAX_MICROTASK_BYTES,
    MICROTASK_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    FileRef,
    Microtask,
    delta_file,
    is_state,
    shard_file,
    smaller_graph_file,
)
from boinc_project.job_config import JobConfig
from boinc_project.job_folder import JobFacts, Published, Shard
from boinc_project.plan import DataPlan, batches_from
from boinc_project.project_tree import ProjectTree, PublishedFile
from work_generator.speed_classes import Place, uniform

STARTUP_FLOPS = 1e10  # unpacking and importing: two to three seconds of a 4 GFLOPS core
LEAST_FPOPS_BOUND = 3e18  # 50 minutes for a host that claims 1 PFLOPS
FPOPS_BOUND_RATIO = 1000.0
PROGRAM_MEMORY_BYTES = 250e6
MEMORY_MARGIN = 1.5
STICKY_LIFETIME_S = 14 * 86400  # data and graphs stay that long on a client that gets no more work of the job
STATE_LIFETIME_S = 86400  # keyframes and deltas: until the next keyframe at most, and each is as large as the model


@dataclass(frozen=True)
class Content:
    """A microtask and, by open name, the published files it needs (without microtask.json itself).

    size_class   BOINC's class of the hosts that it is for; -1: for all
    """

    microtask: Microtask
    files: Mapping[str, Published]
    size_class: int = -1


def data_plan(config: JobConfig, facts: JobFacts) -> DataPlan:
    """How the job's samples are dealt out."""
    rows = tuple(shard.rows for shard in facts.train)
    return DataPlan(config.job.seed, rows, config.data.batch_size, facts.full_batches)


def make_content(
    config: JobConfig, facts: JobFacts, version: int, slot: int, *state: Published, place: Place | None = None
) -> Content:
    """The microtask for this slot over `version`, whose published state is `state`: a keyframe, and deltas if any.

    `place`: its batches; None: those of jobs all of whose microtasks have the same number of steps.
    """
    place = place or uniform(config, version, slot)
    steps = place.steps
    batches, used = batches_from(data_plan(config, facts), place.first_batch, steps)
    files = _files(facts, state, [facts.train[shard] for shard in used])
    if config.mode == "local-steps":
        assert facts.optimizer is not None
        files[OPTIMIZER_FILE] = facts.optimizer
    microtask = Microtask(
        job=config.job.name,
        mode=config.mode,
        base_version=version,
        slot=slot,
        files={name: FileRef(file.sha256, file.size) for name, file in files.items()},
        batch_size=config.data.batch_size,
        batches=batches,
        learning_rates=(config.learning_rate(version),) * steps,
        seed=config.job.seed,
        first_step=place.first_batch,
        codec=replace(config.codec.codec(), part=part_of(config, version, slot)),
        inner_step=config.inner_step(version),
    )
    return Content(microtask, files, place.size_class)


def part_of(config: JobConfig, version: int, slot: int) -> Part:
    """What of its update a microtask sends: by tensors a part a round; by elements the slots share out the parts."""
    by, count = config.policy.parts_by, config.aggregation.parts
    if not by:
        return Part()
    return Part((version if by == "tensors" else version + slot) % count, count, by)


def _files(facts: JobFacts, state: Sequence[Published], shards: list[Shard]) -> dict[str, Published]:
    files = {GRAPH_FILE: facts.graph, STATE_FILE: state[0]}
    files.update({delta_file(k): delta for k, delta in enumerate(state[1:])})
    files.update({smaller_graph_file(size): file for size, file in facts.smaller.items()})
    if facts.constants is not None:
        files[CONSTANTS_FILE] = facts.constants
    files.update({shard_file(k): shard.file for k, shard in enumerate(shards)})
    return files


def workunit_name(microtask: Microtask, digest: str, attempt: int) -> str:
    """Unique for ever: the digest names the contents, the attempt tells repetitions apart."""
    return f"gt_{microtask.job}_v{microtask.base_version}_s{microtask.slot}_a{attempt}_{digest[:16]}"


def microtask_file_name(microtask: Microtask, digest: str) -> str:
    """Physical name of microtask.json; the same for every attempt."""
    return f"gt_{microtask.job}_v{microtask.base_version}_s{microtask.slot}_{digest[:16]}.json"


class Forms:
    """Makes workunit rows; workunits with the same steps and shared inputs share the work of making their XML."""

    def __init__(self, tree: ProjectTree, config: JobConfig, facts: JobFacts, appid: int) -> None:
        self._tree = tree
        self._config = config
        self._facts = facts
        self._appid = appid
        self._made: dict[tuple[int, tuple[tuple[str, str], ...]], templates.WorkunitDocument] = {}

    def row(self, content: Content, document: PublishedFile, *, name: str, now: int) -> dict[str, Any]:
        """The workunit row to insert, all its files being published already. Raises TemplateError."""
        key = content.microtask.steps, tuple((open_name, file.name) for open_name, file in content.files.items())
        form = self._made.get(key)
        if form is None:
            form = self._made[key] = self._form(content)
        text = form.xml_doc
        for blank, value in (
            (_BLANK.name, document.name), (_BLANK.url, escape(document.url)), (_BLANK.md5, document.md5),
            (f"<nbytes>{_BLANK.nbytes}<", f"<nbytes>{document.nbytes}<"),
        ):  # fmt: skip
            text = text.replace(blank, value)
        return templates.new_workunit(
            templates.WorkunitDocument(text, form.columns),
            name=name,
            appid=self._appid,
            result_template_file=self._facts.output_template,
            now=now,
            priority=self._config.workunit.priority,
            size_class=content.size_class,
        )

    def _lifetime(self, open_name: str) -> int:
        """Seconds that a file stays on the client after it was last needed: what serves more than one version does."""
        if not is_state(open_name):
            return STICKY_LIFETIME_S
        return STATE_LIFETIME_S if self._config.supply.keyframe_every > 1 else 0

    def _form(self, content: Content) -> templates.WorkunitDocument:
        """The XML of a workunit with these shared inputs, its microtask's file being left blank."""
        facts, unit = self._facts, self._config.workunit
        inputs = sum(file.size for file in content.files.values()) + MAX_MICROTASK_BYTES
        disk = 1e6 * unit.program_disk_mb + inputs + 3 * facts.memory_bytes + 2 * facts.max_update_bytes
        estimate = facts.step_flops * content.microtask.steps + STARTUP_FLOPS
        references = [
            templates.InputReference(
                open_name=open_name,
                sticky=(lifetime := self._lifetime(open_name)) > 0,
                sticky_lifetime=lifetime,
                no_delete=True,
            )
            for open_name in content.files
        ]
        references.insert(0, templates.InputReference(open_name=MICROTASK_FILE, no_delete=True))
        template = templates.input_template(
            references,
            rsc_fpops_est=estimate,
            rsc_fpops_bound=max(FPOPS_BOUND_RATIO * estimate, LEAST_FPOPS_BOUND),
            rsc_memory_bound=MEMORY_MARGIN * (facts.memory_bytes + PROGRAM_MEMORY_BYTES),
            rsc_disk_bound=disk,
            delay_bound=unit.delay_bound_s,
            # The validator raises both for a copy that may not stand alone (validator/decision.py).
            min_quorum=1 if self._config.trust.adaptive_replication else unit.min_quorum,
            target_nresults=1 if self._config.trust.adaptive_replication else unit.target_nresults,
            max_error_results=unit.max_error_results,
            max_total_results=unit.max_total_results,
            max_success_results=unit.max_success_results,
        )
        published = [_BLANK] + [
            PublishedFile(
                name=file.name,
                url=self._tree.download_url(file.name),
                md5=file.md5,
                nbytes=file.size,
                path=self._tree.download_path(file.name),
            )
            for file in content.files.values()
        ]
        return templates.workunit_document(template, published)


#: Stands for the microtask's file in a form; no published file is called so or has such a size.
_BLANK = PublishedFile(name="=name=", url="=url=", md5="=md5=", nbytes=-1, path=Path())
