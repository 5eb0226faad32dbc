"""Makes a job: checks it against the deployed app versions, writes its folder, publishes its files.

    publish_job(tree, database, job, exported)  ->  job id

Everything is staged first and the row of gt_job comes last, so an interrupted attempt leaves no job, and
trying again publishes the same files under the same names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from boinc_project import clock, store, templates
from boinc_project import database as boinc_tables
from boinc_project.contract import tensorfile, whole_file
from boinc_project.contract.codecs import KINDS, PART_KINDS, Part
from boinc_project.contract.estimates import memory_bytes, step_flops
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import UPDATE_FILE, Microtask
from boinc_project.contract.opset import OPSET
from boinc_project.contract.update import ENCODED_PREFIXES, max_update_bytes, update_types
from boinc_project.database import Database
from boinc_project.gt_tables import JobState, gt_job, gt_version
from boinc_project.inner_state import at_first
from boinc_project.job_config import JobConfig, JobError
from boinc_project.job_folder import JOBS_DIRECTORY, JobFacts, JobFolder, Published, Shard, sha256, state_file_name
from boinc_project.project_tree import ProjectTree
from boinc_project.standard.install import is_standard
from work_generator.export import ExportedJob
from work_generator.job import Job
from work_generator.workunits import data_plan, make_content

Array = npt.NDArray[Any]

SHARD_BYTES = 8 << 20  # of one data shard where job.toml does not say how many samples it holds
OPERATORS_FILE = ".operators.json"  # beside an app version: the operators and codecs it knows
FIRST_CODECS = ("dense", "int8")

Progress = Callable[[str], None]


def publish_job(
    tree: ProjectTree, database: Database, job: Job, exported: ExportedJob, app: str, progress: Progress
) -> int:
    """Create the job in the project; returns its id. Raises JobError with the remedy."""
    config = job.config
    appid = store.app_id(database, app)
    if appid is None:
        raise JobError(f"the project has no app {app!r}; publish an app version first (boinc-train build-app)")
    with database.read() as connection:
        sent = store.sent_versions(connection, appid)
        _check_name(connection, config.job.name)
    if not sent:
        raise JobError(f"the app {app!r} has no version that volunteers could run; run boinc-train build-app first")
    graphs = [g for g in (exported.gradient, exported.optimizer, exported.evaluation) if g is not None]
    graphs += exported.smaller.values()
    check_known(graphs, config, known_to_all(tree.project_dir / "apps" / app, sent))
    check_parts(config, exported.gradient)
    if config.class_steps:
        set_up_classes(tree, database, app, len(config.class_steps))

    folder = JobFolder(tree.project_dir / JOBS_DIRECTORY / config.job.name)
    publisher = Publisher(tree, config.job.name)
    facts = prepare(job, exported, folder, publisher, progress)
    _write_template(tree.project_dir / facts.output_template, facts.max_update_bytes)
    progress("publishing version 0")
    state_path, digest, _ = folder.write_version(0, first_state(config, exported), {})
    state = publisher.state(0, state_path.read_bytes())

    def insert(connection: sa.Connection) -> int:
        _check_name(connection, config.job.name)  # again: another command may have been faster
        job_id = _insert_job(connection, config, facts, folder, appid)
        _insert_version_zero(connection, job_id, digest, state.size)
        for kind, file in _all_files(facts):
            store.record_file(connection, job_id, kind, file)
        store.record_file(connection, job_id, "state", state, version=0)
        return job_id

    return database.repeated(insert)


def _check_name(connection: sa.Connection, name: str) -> None:
    if store.job_named(connection, name) is not None:
        raise JobError(f"the project already has a job {name!r}; choose another name in [job]")


def set_up_classes(tree: ProjectTree, database: Database, app: str, classes: int) -> None:
    """Have the app as many size classes as the job has speeds. Raises JobError.

    On a standard server the administrator has to: BOINC's feeder ends without the census that belongs to them.
    """
    table = boinc_tables.app
    with database.read() as connection:
        row = connection.execute(sa.select(table.c.id, table.c.n_size_classes).where(table.c.name == app)).one()
        running = store.jobs(connection, JobState.RUNNING, JobState.PAUSED, JobState.FAILED, appid=int(row.id))
    if row.n_size_classes == classes:
        return
    for other in running:
        if other.config.class_steps:
            raise JobError(
                f"speed_classes in [train] are {classes}, and the job {other.name!r} of the same app has"
                f" {len(other.config.class_steps)}; write as many, or wait until it has finished"
            )
    if is_standard(tree.config):
        raise JobError(
            f"speed_classes in [train] are {classes}, and the app {app!r} has {row.n_size_classes} size classes;"
            f" run boinc-train install {tree.project_dir} --app {app} --size-classes {classes}"
        )
    with database.transaction() as connection:
        connection.execute(sa.update(table).where(table.c.id == row.id).values(n_size_classes=classes))


def prepare(
    job: Job, exported: ExportedJob, folder: JobFolder, publisher: Publisher, progress: Progress = lambda text: None
) -> JobFacts:
    """Write the job's folder, hand its files to the publisher, and gather the facts. Raises JobError."""
    config = job.config
    folder.create()
    progress("publishing graphs")
    graph = publisher.file(folder.gradient_graph_path, "graph", exported.gradient.to_bytes(), ".json.zst")
    smaller = {
        size: publisher.file(folder.smaller_graph_path(size), f"graph{size}", each.to_bytes(), ".json.zst")
        for size, each in exported.smaller.items()
    }
    optimizer = (
        publisher.file(folder.optimizer_graph_path, "optimizer", exported.optimizer.to_bytes(), ".json.zst")
        if exported.optimizer is not None
        else None
    )
    evaluation = publisher.keep(folder.evaluation_graph_path, exported.evaluation.to_bytes())
    constants = (
        publisher.file(folder.constants_path, "constants", tensorfile.to_bytes(exported.constants), ".safetensors")
        if exported.constants
        else None
    )
    train = _shards(job, "train", folder, publisher, progress)
    test = _shards(job, "test", folder, publisher, progress) if "test" in job.data else ()
    shipped = exported.optimizer if config.ships_state else None
    types = update_types(exported.gradient, config.mode, config.steps, shipped)
    codec = config.codec.codec()
    facts = JobFacts(
        graph=graph,
        smaller=smaller,
        optimizer=optimizer,
        evaluation=evaluation,
        constants=constants,
        train=train,
        test=test,
        step_flops=step_flops(exported.gradient, exported.optimizer),
        memory_bytes=memory_bytes(
            exported.gradient, exported.optimizer, types, sum(shard.file.size for shard in train[:2])
        ),
        max_update_bytes=max_update_bytes(types, codec),
        full_batches=exported.needs_full_batches,
        evaluation_full_batches=exported.evaluation_needs_full_batches,
        output_template=f"templates/gt_{config.job.name}_out",
        state_dict=exported.state_dict,
    )
    if data_plan(config, facts).batches_per_epoch < 1:
        raise JobError(
            f"the training data have {sum(s.rows for s in train)} samples, fewer than one batch of"
            f" {config.data.batch_size}; lower batch_size in [data] (this model's batches must be full)"
        )
    return facts


def first_state(config: JobConfig, exported: ExportedJob) -> dict[str, Array]:
    """What version 0 is made of: parameters and buffers, and the inner optimizer's state where that is shipped."""
    state = dict(exported.state)
    if config.ships_state:
        assert exported.optimizer is not None
        state.update(at_first(exported.optimizer))
    return state


def local_content(job: Job, exported: ExportedJob, slot: int, place: Path) -> tuple[Microtask, dict[str, Path]]:
    """The first version's microtask for a slot, without a project: its files lie under `place`, by open name."""
    folder = JobFolder(place)
    publisher = Publisher(None, job.config.job.name)
    facts = prepare(job, exported, folder, publisher)
    path, _, _ = folder.write_version(0, first_state(job.config, exported), {})
    state = publisher.state(0, path.read_bytes())
    content = make_content(job.config, facts, 0, slot, state)
    by_name = {
        facts.graph.name: folder.gradient_graph_path,
        **{file.name: folder.smaller_graph_path(size) for size, file in facts.smaller.items()},
        state.name: path,
        **{shard.file.name: folder.shard_path("train", k) for k, shard in enumerate(facts.train)},
    }
    if facts.optimizer is not None:
        by_name[facts.optimizer.name] = folder.optimizer_graph_path
    if facts.constants is not None:
        by_name[facts.constants.name] = folder.constants_path
    return content.microtask, {open_name: by_name[file.name] for open_name, file in content.files.items()}


@dataclass(frozen=True)
class Known:
    """What every app version that a job would be sent to can run."""

    operators: frozenset[str]
    codecs: frozenset[str]
    parts: frozenset[str]  # ways of sending a part of an update
    deltas: bool  # versions that are published as deltas
    inner_state: bool  # inner optimizers that go on from a state


def check_known(graphs: list[Graph], config: JobConfig, known: Known) -> None:
    """Refuse a job that an app version could not run to which it would be sent, before any workunit exists."""
    newer = "publish a newer app version for that platform and plan class (boinc-train build-app --version), or change"
    for graph in graphs:
        missing = sorted(graph.operators() - known.operators)
        if missing:
            raise JobError(
                f"the model needs the operator {missing[0]!r}, which an app version in use does not know; {newer} the"
                " model"
            )
    codec = config.codec.kind
    if codec not in known.codecs:
        raise JobError(f"an app version in use does not know the codec {codec!r}; {newer} kind in [codec]")
    if config.policy.parts_by and config.policy.parts_by not in known.parts:
        raise JobError(f"an app version in use cannot send a part of an update; {newer} policy in [train]")
    if config.supply.keyframe_every > 1 and not known.deltas:
        raise JobError(f"an app version in use does not know deltas of versions; {newer} keyframe_every in [supply]")
    if config.ships_state and not known.inner_state:
        raise JobError(f"an app version in use cannot go on from a state; {newer} state in [inner_optimizer]")


def check_parts(config: JobConfig, graph: Graph) -> None:
    """Refuse fragments without a tensor: a version of one would be computed for nothing. Raises JobError."""
    if config.policy.parts_by != "tensors":
        return
    types = update_types(graph, config.mode, config.steps)
    moving = {name: kind for name, kind in types.items() if name.startswith(ENCODED_PREFIXES)}

    def all_hold_some(count: int) -> bool:
        return all(Part(index, count).of_tensors(moving) for index in range(count))

    count = config.aggregation.parts
    if not all_hold_some(count):
        most = next(each for each in range(min(count, len(moving)), 0, -1) if all_hold_some(each))
        raise JobError(
            f"parts = {count} in [aggregation] leaves a part without any of the model's {len(moving)} tensors, none of"
            f" which is divided; write parts = {most}"
        )


def known_to_all(app_folder: Path, sent: Sequence[store.Row]) -> Known:
    """What each of these app versions says that it knows (.operators.json in its folder)."""
    operators, codecs, parts = frozenset(OPSET), frozenset(KINDS), frozenset(PART_KINDS)
    deltas = inner_state = True
    wanted = {(int(row["version_num"]), str(row["platform"]), str(row["plan_class"])) for row in sent}
    # Builds of an earlier release have no dot in front.
    for path in sorted(app_folder.glob(f"*/*/*{OPERATORS_FILE.removeprefix('.')}")):
        if _version_of(path.parent) not in wanted:
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise JobError(f"{path} cannot be read ({error}); run boinc-train build-app again") from error
        # A release that knew two codecs wrote a list of operators.
        both = found if isinstance(found, dict) else {"operators": found, "codecs": FIRST_CODECS}
        operators &= {str(name) for name in both.get("operators", ())}
        codecs &= {str(name) for name in both.get("codecs", ())}
        parts &= {str(name) for name in both.get("parts", ())}
        deltas &= bool(both.get("deltas"))
        inner_state &= bool(both.get("inner_state"))
    return Known(operators, codecs, parts, deltas, inner_state)


def _version_of(folder: Path) -> tuple[int, str, str] | None:
    """Number, platform and plan class of a folder VERSION/PLATFORM[__PLANCLASS]; None if it is no such folder."""
    number = re.fullmatch(r"(\d+)\.(\d+)", folder.parent.name)
    platform, _, plan_class = folder.name.partition("__")
    return None if number is None else (100 * int(number[1]) + int(number[2]), platform, plan_class)


class Publisher:
    """Stages files under names that carry their contents' digest; without a project it only names them."""

    def __init__(self, tree: ProjectTree | None, job: str) -> None:
        self._tree = tree
        self._job = job

    def file(self, path: Path, kind: str, data: bytes, suffix: str) -> Published:
        """Keep `data` in the job's folder and publish it."""
        whole_file.write_bytes(path, data)
        return self._stage(f"gt_{self._job}_{kind}_{sha256(data)[:16]}{suffix}", data)

    def keep(self, path: Path, data: bytes) -> Published:
        """Keep `data` in the job's folder only: what volunteers have no need of is not offered to them."""
        whole_file.write_bytes(path, data)
        return Published(path.name, sha256(data), hashlib.md5(data).hexdigest(), len(data))

    def state(self, version: int, data: bytes) -> Published:
        """Publish the state of a model version."""
        return self._stage(state_file_name(self._job, version, sha256(data)), data)

    def _stage(self, name: str, data: bytes) -> Published:
        if self._tree is not None:
            self._tree.stage_file(data, name)
        return Published(name, sha256(data), hashlib.md5(data).hexdigest(), len(data))


def _shards(job: Job, split: str, folder: JobFolder, publisher: Publisher, progress: Progress) -> tuple[Shard, ...]:
    fields = {f"batch/{name}": tensor.numpy() for name, tensor in job.data[split].items()}
    samples = len(next(iter(fields.values())))
    per_sample = max(1, sum(array[:1].nbytes for array in fields.values()))
    size = job.config.data.shard_samples or max(job.config.data.batch_size, SHARD_BYTES // per_sample)
    made = []
    for number, start in enumerate(range(0, samples, size)):
        progress(f"publishing {split} data, shard {number + 1} of {-(-samples // size)}")
        piece: Mapping[str, Array] = {n: np.ascontiguousarray(a[start : start + size]) for n, a in fields.items()}
        data = tensorfile.to_bytes(piece)
        path = folder.shard_path(split, number)
        if split == "train":
            file = publisher.file(path, f"{split}{number}", data, ".safetensors")
        else:  # held-out data never leave the server: who knows them can please the evaluation
            file = publisher.keep(path, data)
        made.append(Shard(file, len(next(iter(piece.values())))))
    return tuple(made)


def _write_template(path: Path, max_nbytes: int) -> None:
    text = templates.output_template([templates.OutputReference(open_name=UPDATE_FILE, max_nbytes=max_nbytes)])
    templates.check_output_template(text)
    whole_file.write_bytes(path, text.encode())


def _insert_job(connection: sa.Connection, config: JobConfig, facts: JobFacts, folder: JobFolder, appid: int) -> int:
    done = connection.execute(
        sa.insert(gt_job).values(
            name=config.job.name,
            appid=appid,
            create_time=int(clock.now()),
            state=str(JobState.RUNNING),
            note="",
            config=config.canonical_json(),
            folder=str(folder.path),
            facts=facts.to_json(),
            current_version=0,
        )
    )
    key = done.inserted_primary_key
    assert key is not None
    return int(key[0])


def _insert_version_zero(connection: sa.Connection, job_id: int, digest: str, size: int) -> None:
    connection.execute(
        sa.insert(gt_version).values(
            job_id=job_id,
            version=0,
            create_time=clock.now(),
            state_sha256=digest,
            state_bytes=size,
            optimizer_sha256="",
            contributions=0,
            samples=0,
            loss=None,
            evaluation="",
        )
    )


def _all_files(facts: JobFacts) -> list[tuple[str, Published]]:
    found = [("graph", file) for file in (facts.graph, *facts.smaller.values())]
    found += [("optimizer", facts.optimizer)] if facts.optimizer else []
    found += [("constants", facts.constants)] if facts.constants else []
    return found + [("shard", shard.file) for shard in facts.train]
