"""The microtask: graphs, state, constants, batches, and how many steps. All that a volunteer's PC runs.

    for each step:  state, metrics = graph(state, constants, batch, seed, step, learning rate)

What it is: a small canonical JSON document that names every other file by SHA-256, so that its own digest
names the whole work. What it is not: it does not know its workunit; the same microtask issued again
(because a workunit failed) has the same bytes.

Modes:
    gradient      sum of the gradients over all batches; the model stays as it is
    local-steps   one inner optimizer step per batch; the result is start minus end (DiLoCo,
                  Douillard et al. 2023, https://arxiv.org/abs/2311.08105)
    evaluation    metrics only
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from boinc_project.contract import canonical
from boinc_project.contract.canonical import Taker
from boinc_project.contract.codecs import Codec, CodecSeed, Part
from boinc_project.contract.downlink import MAX_DELTAS
from boinc_project.contract.errors import ContractError

FORMAT = "boinc-train-microtask"
VERSION = 1
MODES = ("gradient", "local-steps", "evaluation")

MICROTASK_FILE = "microtask.json"
GRAPH_FILE = "graph.json.zst"
OPTIMIZER_FILE = "optimizer.json.zst"
STATE_FILE = "state.safetensors"
CONSTANTS_FILE = "constants.safetensors"
UPDATE_FILE = "update.safetensors"

MAX_MICROTASK_BYTES = 16 << 20
MAX_STEPS = 100_000
MAX_BATCH = 1 << 20
MAX_SHARDS = 10_000
MAX_SMALLER_GRAPHS = 2
MAX_VALUES = 4_000_000  # of the document: two for each sample

_SMALLER_GRAPH = re.compile(r"graph_([1-9][0-9]{0,7})\.json\.zst")


class MicrotaskError(ContractError):
    """A microtask document is not well-formed."""


def shard_file(number: int) -> str:
    """Open name of the number-th data shard of a microtask."""
    return f"shard_{number}.safetensors"


def delta_file(number: int) -> str:
    """Open name of the number-th delta after the keyframe in STATE_FILE (contract/downlink.py)."""
    return f"delta_{number}.safetensors"


def is_state(open_name: str) -> bool:
    """Whether a file is part of the state: the keyframe, or a delta."""
    return open_name == STATE_FILE or open_name.startswith("delta_")


def smaller_graph_file(batch_size: int) -> str:
    """Open name of the graph for batches of that size, smaller than the microtask's (contract/smaller.py)."""
    return f"graph_{batch_size}.json.zst"


@dataclass(frozen=True)
class FileRef:
    """A file that travels with the microtask: SHA-256 (64 hex digits) and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Batch:
    """One step's samples: for each sample the number of its shard and its row in it.

    At most the graph's batch size; the runner pads what is missing and masks it.
    """

    shards: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def samples(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Microtask:
    """One piece of work, independent of who does it.

    files            open name -> FileRef, for every file but the microtask itself; the state is STATE_FILE and the
                     deltas after it, in order (contract/downlink.py)
    batch_size       static batch dimension of the graph; graphs of parts of it may travel along (smaller_batches)
    batches          one per step
    learning_rates   one per step (inner learning rate; unused by gradients)
    seed, first_step of the random generator: step i draws with (seed, first_step + i)
    codec            draws by this microtask's seed, version and slot, whatever seed it was given with
    inner_step       local-steps: the steps that the inner optimizer's state has seen, which is part of the state and of
                     the update; None: it begins with zeros and is forgotten
    """

    job: str
    mode: str
    base_version: int
    slot: int
    files: Mapping[str, FileRef]
    batch_size: int
    batches: tuple[Batch, ...]
    learning_rates: tuple[float, ...]
    seed: int
    first_step: int
    codec: Codec
    inner_step: int | None = None

    def __post_init__(self) -> None:
        seed = CodecSeed(self.seed, self.base_version, self.slot)
        object.__setattr__(self, "codec", self.codec.seeded(seed))

    @property
    def steps(self) -> int:
        return len(self.batches)

    @property
    def samples(self) -> int:
        """Real samples in all batches: the weight of its update."""
        return sum(batch.samples for batch in self.batches)

    @property
    def ships_state(self) -> bool:
        """Whether the inner optimizer's state is part of the state and of the update."""
        return self.inner_step is not None

    @property
    def shard_count(self) -> int:
        return sum(1 for name in self.files if name.startswith("shard_"))

    @property
    def delta_count(self) -> int:
        return sum(1 for name in self.files if is_state(name)) - 1

    @property
    def smaller_batches(self) -> tuple[int, ...]:
        """Batch sizes of the further graphs, for devices on which the whole batch does not fit, largest first."""
        return _smaller_batches(self.files)

    def to_json(self) -> bytes:
        shipped = {} if self.inner_step is None else {"inner_step": self.inner_step}
        return canonical.dumps(
            {
                **shipped,
                "format": FORMAT,
                "version": VERSION,
                "job": self.job,
                "mode": self.mode,
                "base_version": self.base_version,
                "slot": self.slot,
                "files": {name: {"sha256": ref.sha256, "size": ref.size} for name, ref in self.files.items()},
                "batch_size": self.batch_size,
                "batches": [{"shards": list(b.shards), "rows": list(b.rows)} for b in self.batches],
                "learning_rates": list(self.learning_rates),
                "seed": self.seed,
                "first_step": self.first_step,
                "codec": self.codec.to_document(),
            }
        )

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @staticmethod
    def from_json(text: bytes) -> Microtask:
        """Read and check a microtask; raises MicrotaskError."""
        if len(text) > MAX_MICROTASK_BYTES:
            raise MicrotaskError(f"microtask has {len(text)} bytes, more than {MAX_MICROTASK_BYTES}", fault="too_large")
        document = canonical.loads(text, "microtask", MicrotaskError, MAX_VALUES)
        return _from_document(Taker(document, "microtask", MicrotaskError))


class Essentials(NamedTuple):
    """What judging and folding an update need of its microtask."""

    mode: str
    steps: int
    codec: Codec
    graph_sha256: str
    ships_state: bool = False


def essentials(text: str | bytes) -> Essentials:
    """Read these from a document of our own, which was checked when it was issued."""
    document = json.loads(text)
    seed = CodecSeed(document["seed"], document["base_version"], document["slot"])
    named = dict(document["codec"])
    part = named.pop("part", {})
    codec = _codec(tuple(named.items()), tuple(part.items())).seeded(seed)
    graph, ships_state = document["files"][GRAPH_FILE]["sha256"], "inner_step" in document
    return Essentials(document["mode"], len(document["batches"]), codec, graph, ships_state)


@functools.lru_cache(maxsize=64)  # nearly the same one in all documents of a job
def _codec(named: tuple[tuple[str, Any], ...], part: tuple[tuple[str, Any], ...]) -> Codec:
    return Codec(**dict(named), part=Part(**dict(part)))


def _from_document(take: Taker) -> Microtask:
    take.only(
        "format", "version", "job", "mode", "base_version", "slot", "files", "batch_size", "batches",
        "learning_rates", "seed", "first_step", "codec", "inner_step",
    )  # fmt: skip
    if take.text("format") != FORMAT or take.integer("version") != VERSION:
        raise MicrotaskError(f"this is not a microtask of format version {VERSION}", fault="format")
    mode = take.text("mode", 32)
    if mode not in MODES:
        raise MicrotaskError(f"microtask mode {mode[:40]!r} is unknown", fault="mode")
    files = _files(take.object("files"), take.mapping("files"))
    shards = sum(1 for name in files if name.startswith("shard_"))
    batch_size = take.integer("batch_size", 1, MAX_BATCH)
    _check_smaller_batches(batch_size, _smaller_batches(files))
    batches = []
    for item in take.items("batches", MAX_STEPS):
        item.only("shards", "rows")
        shards_of_samples = item.integers("shards", 0, MAX_SHARDS, batch_size)
        batch = Batch(shards_of_samples, item.integers("rows", 0, 2**40, batch_size))
        if len(batch.shards) != len(batch.rows) or not 1 <= batch.samples <= batch_size:
            raise MicrotaskError(f"{item.place}: {batch.samples} samples for a batch of {batch_size}", fault="batch")
        if max(batch.shards) >= shards:
            raise MicrotaskError(f"{item.place}: names shard {max(batch.shards)} of {shards}", fault="batch")
        batches.append(batch)
    rates = take.numbers("learning_rates", MAX_STEPS)
    if not batches or len(rates) != len(batches):
        raise MicrotaskError(f"microtask has {len(batches)} batches and {len(rates)} learning rates", fault="steps")
    _need_files(mode, files)
    inner_step = take.integer("inner_step", 0, 2**48) if take.has("inner_step") else None
    if inner_step is not None and mode != "local-steps":
        raise MicrotaskError(f"microtask of mode {mode} has no inner optimizer", fault="mode")
    job = take.text("job", 64)
    if not job.isascii() or not job.isprintable():
        raise MicrotaskError("microtask job must be printable ASCII: its name goes into logs", fault="name")
    return Microtask(
        job=job,
        mode=mode,
        base_version=take.integer("base_version", 0),
        slot=take.integer("slot", 0),
        files=files,
        batch_size=batch_size,
        batches=tuple(batches),
        learning_rates=rates,
        seed=take.integer("seed", 0),
        first_step=take.integer("first_step", 0, 2**48),
        codec=Codec.from_document(take.object("codec")),
        inner_step=inner_step,
    )


def _files(take: Taker, names: Mapping[str, Any]) -> dict[str, FileRef]:
    if len(names) > MAX_SHARDS + MAX_DELTAS + 8:
        raise MicrotaskError(f"microtask names {len(names)} files", fault="too_large")
    found = {}
    shards = [name for name in names if name.startswith("shard_")]
    deltas = sum(1 for name in names if is_state(name) and name != STATE_FILE)
    allowed = {GRAPH_FILE, OPTIMIZER_FILE, STATE_FILE, CONSTANTS_FILE} | {shard_file(k) for k in range(len(shards))}
    allowed |= {delta_file(k) for k in range(min(deltas, MAX_DELTAS))}
    for name in names:
        if name not in allowed and not _SMALLER_GRAPH.fullmatch(name):
            raise MicrotaskError(f"microtask names an unknown file {name[:80]!r}", fault="file_name")
        item = take.object(name)
        item.only("sha256", "size")
        digest = item.text("sha256", 64)
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise MicrotaskError(f"microtask file {name!r}: its SHA-256 is malformed", fault="digest")
        found[name] = FileRef(digest, item.integer("size", 0, 2**44))
    return found


def _smaller_batches(files: Mapping[str, FileRef]) -> tuple[int, ...]:
    matches = (_SMALLER_GRAPH.fullmatch(name) for name in files)
    return tuple(sorted((int(match[1]) for match in matches if match), reverse=True))


def _check_smaller_batches(batch_size: int, smaller: tuple[int, ...]) -> None:
    if len(smaller) > MAX_SMALLER_GRAPHS:
        raise MicrotaskError(
            f"microtask names {len(smaller)} smaller graphs, more than {MAX_SMALLER_GRAPHS}", fault="batch"
        )
    for size in smaller:
        if size >= batch_size or batch_size % size:
            raise MicrotaskError(f"a batch of {batch_size} has no equal parts of {size} samples", fault="batch")


def _need_files(mode: str, files: Mapping[str, FileRef]) -> None:
    needed = [GRAPH_FILE, STATE_FILE, shard_file(0)] + ([OPTIMIZER_FILE] if mode == "local-steps" else [])
    for name in needed:
        if name not in files:
            raise MicrotaskError(f"microtask of mode {mode} lacks the file {name}", fault="missing_file")
