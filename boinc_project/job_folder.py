"""A job's files on the server: PROJECT/gt_jobs/NAME, written only by our daemons and commands.

    job.json                      the settings, as stored in gt_job.config
    graphs/                       gradient (also for smaller batches), optimizer and evaluation graphs
    constants.safetensors         constants of the graphs, if any
    shards/                       data shards, train_K and test_K
    versions/                     state, optimizer state and anchors of the model versions that are kept
    payloads/                     validated updates that are not yet part of a kept version

Everything here appears by rename after fsync and carries its digest in its name or in the database.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy.typing as npt

from boinc_project.contract import canonical, tensorfile, whole_file
from boinc_project.contract.canonical import Taker
from boinc_project.contract.errors import ContractError
from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import update_types

Array = npt.NDArray[Any]
JOBS_DIRECTORY = "gt_jobs"
_FOLDERS = ("graphs", "shards", "versions", "payloads")
STATE_METADATA: Mapping[str, Any] = {"format": "boinc-train-state"}

_VERSION_FILE = re.compile(r"(?:state|optimizer)_(\d+)_[0-9a-f]{16}\.safetensors")
_ANCHOR_FILE = re.compile(r"anchor_(\d+)_[0-9a-f]{16}\.safetensors")
# Named after the workunit, whose name holds the base version (work_generator/workunits.py).
_PAYLOAD_FILE = re.compile(r"gt_.+_v(\d+)_s\d+_a\d+_[0-9a-f]{16}\.[0-9a-f]{16}\.update")


@dataclass(frozen=True)
class Published:
    """A file that clients download, by its physical name; SHA-256, MD5 (BOINC wants it) and size in bytes."""

    name: str
    sha256: str
    md5: str
    size: int

    def to_document(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "md5": self.md5, "size": self.size}

    @staticmethod
    def from_document(take: Taker) -> Published:
        return Published(take.text("name", 191), take.text("sha256", 64), take.text("md5", 32), take.integer("size", 0))


@dataclass(frozen=True)
class Shard:
    """A published data shard and its number of rows."""

    file: Published
    rows: int


@dataclass(frozen=True)
class JobFacts:
    """What export and publishing found out about a job, kept in gt_job.facts.

    smaller           the gradient graph for smaller batches, by their size; mostly none
    step_flops        floating-point operations of one step (gradient, plus optimizer in local-steps mode)
    memory_bytes      upper estimate of what one microtask takes in the application
    max_update_bytes  no honest update is larger
    full_batches      samples of a batch are mixed (scalar loss, batch norm), so no batch may be padded
    output_template   path of the output template, relative to the project directory
    state_dict        name in the model's own state_dict -> name in a state or in the constants
    """

    graph: Published
    smaller: Mapping[int, Published]
    optimizer: Published | None
    evaluation: Published
    constants: Published | None
    train: tuple[Shard, ...]
    test: tuple[Shard, ...]
    step_flops: int
    memory_bytes: int
    max_update_bytes: int
    full_batches: bool
    evaluation_full_batches: bool
    output_template: str
    state_dict: Mapping[str, str]

    def to_json(self) -> str:
        def optional(file: Published | None) -> Any:
            return None if file is None else file.to_document()

        def shards(files: tuple[Shard, ...]) -> Any:
            return [{"file": shard.file.to_document(), "rows": shard.rows} for shard in files]

        return canonical.dumps(
            {
                "graph": self.graph.to_document(),
                "smaller": {str(size): file.to_document() for size, file in self.smaller.items()},
                "optimizer": optional(self.optimizer),
                "evaluation": self.evaluation.to_document(),
                "constants": optional(self.constants),
                "train": shards(self.train),
                "test": shards(self.test),
                "step_flops": self.step_flops,
                "memory_bytes": self.memory_bytes,
                "max_update_bytes": self.max_update_bytes,
                "full_batches": self.full_batches,
                "evaluation_full_batches": self.evaluation_full_batches,
                "output_template": self.output_template,
                "state_dict": dict(self.state_dict),
            }
        ).decode("ascii")

    @staticmethod
    def from_json(text: str) -> JobFacts:
        take = Taker(canonical.loads(text.encode(), "job facts"), "job facts", ContractError)

        def optional(name: str) -> Published | None:
            return None if take.value(name) is None else Published.from_document(take.object(name))

        def smaller() -> dict[int, Published]:
            if not take.has("smaller"):  # jobs that were made before there was any
                return {}
            names = take.mapping("smaller")
            return {int(name): Published.from_document(take.object("smaller").object(name)) for name in names}

        def shards(name: str) -> tuple[Shard, ...]:
            return tuple(
                Shard(Published.from_document(item.object("file")), item.integer("rows", 1))
                for item in take.items(name, 100_000)
            )

        return JobFacts(
            graph=Published.from_document(take.object("graph")),
            smaller=smaller(),
            optimizer=optional("optimizer"),
            evaluation=Published.from_document(take.object("evaluation")),
            constants=optional("constants"),
            train=shards("train"),
            test=shards("test"),
            step_flops=take.integer("step_flops", 0),
            memory_bytes=take.integer("memory_bytes", 0),
            max_update_bytes=take.integer("max_update_bytes", 0),
            full_batches=take.boolean("full_batches"),
            evaluation_full_batches=take.boolean("evaluation_full_batches"),
            output_template=take.text("output_template", 63),
            state_dict={str(name): str(inner) for name, inner in take.mapping("state_dict").items()},
        )


@lru_cache(maxsize=64)
def _update_types(
    graph: Path, _changed: int, mode: str, steps: int, optimizer: Path | None
) -> Mapping[str, TensorType]:
    """The types of updates over the graph in a file; its time of change is part of the key."""
    shipped = None if optimizer is None else Graph.from_bytes(optimizer.read_bytes())
    return update_types(Graph.from_bytes(graph.read_bytes()), mode, steps, shipped)


class JobFolder:
    """Paths and contents of one job's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._update_types: dict[tuple[str, int, bool], Mapping[str, TensorType]] = {}

    @property
    def gradient_graph_path(self) -> Path:
        return self.path / "graphs" / "gradient.json.zst"

    def smaller_graph_path(self, batch_size: int) -> Path:
        """The gradient graph for smaller batches of that size."""
        return self.path / "graphs" / f"gradient_{batch_size}.json.zst"

    @property
    def optimizer_graph_path(self) -> Path:
        return self.path / "graphs" / "optimizer.json.zst"

    @property
    def evaluation_graph_path(self) -> Path:
        return self.path / "graphs" / "evaluation.json.zst"

    @property
    def constants_path(self) -> Path:
        return self.path / "constants.safetensors"

    def shard_path(self, split: str, number: int) -> Path:
        return self.path / "shards" / f"{split}_{number}.safetensors"

    def payload_path(self, workunit_name: str, sha256: str) -> Path:
        """Where intake keeps a validated update until it is part of a version."""
        return self.path / "payloads" / f"{workunit_name}.{sha256[:16]}.update"

    def state_path(self, version: int, sha256: str) -> Path:
        """The state (parameters and buffers) of a model version."""
        return self.path / "versions" / f"state_{version:06d}_{sha256[:16]}.safetensors"

    def optimizer_path(self, version: int, sha256: str) -> Path:
        """The server's optimizer state after that version."""
        return self.path / "versions" / f"optimizer_{version:06d}_{sha256[:16]}.safetensors"

    def anchor_path(self, version: int, sha256: str) -> Path:
        """The server's own gradient at that version (assimilator/anchors.py)."""
        return self.path / "versions" / f"anchor_{version:06d}_{sha256[:16]}.safetensors"

    def anchor_files(self) -> list[tuple[int, Path]]:
        """(version, path) of every anchor on disk."""
        return _numbered(self.path / "versions", _ANCHOR_FILE)

    def version_files(self) -> list[tuple[int, Path]]:
        """(version, path) of every state and optimizer state on disk."""
        return _numbered(self.path / "versions", _VERSION_FILE)

    def payload_files(self) -> list[tuple[int, Path]]:
        """(base version, path) of every payload on disk."""
        return _numbered(self.path / "payloads", _PAYLOAD_FILE)

    def create(self) -> None:
        for name in _FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)

    @cached_property
    def gradient_graph(self) -> Graph:
        return Graph.from_bytes(self.gradient_graph_path.read_bytes())

    def update_types(self, mode: str, steps: int, ships_state: bool = False) -> Mapping[str, TensorType]:
        """Name -> type of every tensor of an update of this mode with so many steps."""
        key = (mode, steps, ships_state)
        if key not in self._update_types:
            path, optimizer = self.gradient_graph_path, self.optimizer_graph_path if ships_state else None
            self._update_types[key] = _update_types(path, path.stat().st_mtime_ns, mode, steps, optimizer)
        return self._update_types[key]

    def write_version(
        self, version: int, state: Mapping[str, Array], optimizer: Mapping[str, Array]
    ) -> tuple[Path, str, str]:
        """Write a version's files; returns (path of the state, its SHA-256, the optimizer state's SHA-256 or '').

        Names carry the digests, so writing the same version again after a crash changes nothing.
        """
        digest = _digest(state, STATE_METADATA)
        path = self.state_path(version, digest)
        optimizer_digest = _digest(optimizer, {}) if optimizer else ""
        if optimizer:
            _write_once(self.optimizer_path(version, optimizer_digest), optimizer, {}, optimizer_digest)
        _write_once(path, state, STATE_METADATA, digest)
        return path, digest, optimizer_digest

    def read_state(self, version: int, digest: str) -> dict[str, Array]:
        """parameter/* and buffer/* of a version; raises ContractError if the file is not the recorded one."""
        return _read_checked(self.state_path(version, digest), digest)

    def write_anchor(self, version: int, tensors: Mapping[str, Array]) -> str:
        """Write a version's anchor; returns its SHA-256."""
        digest = _digest(tensors, {})
        _write_once(self.anchor_path(version, digest), tensors, {}, digest)
        return digest

    def read_anchor(self, version: int, digest: str) -> dict[str, Array]:
        """The anchor of a version; raises ContractError if the file is not the recorded one."""
        return _read_checked(self.anchor_path(version, digest), digest)

    def read_optimizer(self, version: int, digest: str) -> dict[str, Array]:
        """The optimizer state kept with a version ({} if it has none)."""
        return _read_checked(self.optimizer_path(version, digest), digest) if digest else {}


def folders_of_jobs(project_dir: Path) -> Iterator[Path]:
    """Every folder in which our daemons and commands keep files of jobs."""
    for job in sorted((project_dir / JOBS_DIRECTORY).glob("*/")):
        yield job
        for name in _FOLDERS:
            yield job / name


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    matches = ((pattern.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return [(int(match[1]), path) for match, path in matches if match]


def state_file_name(job: str, version: int, digest: str) -> str:
    """Physical name under which a model version's state is published; one name, one content, for ever."""
    return f"gt_{job}_v{version}_{digest[:16]}.safetensors"


def delta_file_name(job: str, version: int, digest: str, base: str, target: str) -> str:
    """Physical name of a delta, which says from which state to which it leads: after a rollback a version can have
    several. Arguments: SHA-256 of the delta, of the state of the version before, and of this one's."""
    return f"gt_{job}_v{version}_{digest[:16]}{_between(base, target)}"


def leads(delta: str, base: str, target: str) -> bool:
    """Whether the delta of this physical name leads from the one state to the other (their SHA-256)."""
    return delta.endswith(_between(base, target))


def _between(base: str, target: str) -> str:
    return f"_from_{base[:16]}_to_{target[:16]}.safetensors"


def state_bytes(state: Mapping[str, Array]) -> bytes:
    """The one file form of a state: a version *is* these bytes, so it is identified by their SHA-256."""
    return tensorfile.to_bytes(state, STATE_METADATA)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(tensors: Mapping[str, Array], metadata: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for piece in tensorfile.chunks(tensors, metadata):
        digest.update(piece)
    return digest.hexdigest()


def _write_once(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, Any], digest: str) -> None:
    """Write a file, piece by piece, unless these bytes are there already."""
    if not (path.exists() and file_sha256(path) == digest):
        whole_file.write_chunks(path, tensorfile.chunks(tensors, metadata))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_checked(path: Path, digest: str) -> dict[str, Array]:
    """A file's tensors, in memory that the caller may write to."""
    with path.open("rb") as stream:
        data = bytearray(os.fstat(stream.fileno()).st_size)
        stream.readinto(data)
    if hashlib.sha256(data).hexdigest() != digest:
        raise ContractError(f"{path} is damaged: its SHA-256 is not the recorded one", fault="digest")
    return dict(tensorfile.from_bytes(memoryview(data), None, path.name).tensors)
