"""Honest updates: what the application gives back for a microtask, computed here by its own runner.

One computation serves all copies of a microtask. Real copies differ by rounding; `noise` puts that in: each number of
a copy is multiplied by 1 + noise * n, n normal, drawn for the host and the microtask, so that no two copies are
bit-equal while a host's own answer is always the same.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from apps.gradient.backends import Backend, Program, open_backend
from apps.gradient.runner import Loaded, Run, load
from boinc_project.contract.codecs import Codec
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import Microtask
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import Update, read_update, write_update

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]
Places = Mapping[str, Path]

KEPT = 512  # honest updates in memory

#: Of an update, what moves the model; liars change it, rounding differs in it.
MOVING = ("gradient/", "delta/")


@dataclass(frozen=True)
class Computed:
    """An honest update, and what it takes to write it down."""

    microtask: Microtask
    digest: str
    types: Mapping[str, TensorType]
    tensors: Tensors
    files: Places

    @property
    def codec(self) -> Codec:
        return self.microtask.codec


_graph = functools.lru_cache(maxsize=8)(Graph.from_bytes)


class _Remembering:
    """A backend that prepares a graph once, as long as it is one of the last few."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._programs: OrderedDict[tuple[int, AbstractSet[str]], tuple[Graph, Program]] = OrderedDict()

    def program(self, graph: Graph, verify: bool = False, consume: AbstractSet[str] = frozenset()) -> Program:
        key = (id(graph), consume)  # of a graph that is kept here, so that no other one has its id
        if key not in self._programs:
            self._programs[key] = graph, self._backend.program(graph, verify, consume)
        self._programs.move_to_end(key)
        if len(self._programs) > 16:
            self._programs.popitem(last=False)
        return self._programs[key][1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Computer:
    """Computes microtasks with one of the application's backends (numpy, torch), on one thread.

    `kept`: honest updates that stay in memory, so that none of them is computed again.
    """

    def __init__(self, backend: str = "numpy", noise: float = 0.0, kept: int = KEPT) -> None:
        self._backend = cast(Backend, _Remembering(open_backend(backend, 1)))
        self.noise = noise
        self._most = kept
        self.computed = 0  # microtasks so far
        self._kept: OrderedDict[str, Computed] = OrderedDict()
        self._encoded: OrderedDict[str, bytes] = OrderedDict()

    def honest(self, key: str, files: Places) -> Computed:
        """The honest update of the microtask that `key` names for ever; `files` says where its files are, by open
        name."""
        found = self._kept.get(key)
        if found is None:
            loaded = load(lambda name: files[name], read_graph=_graph)
            found = Computed(loaded.microtask, loaded.digest, loaded.types, self._run(loaded), files)
            self._keep(self._kept, key, found)
            self.computed += 1
        return found

    def changed(self, computed: Computed, change: Callable[[str, Array], Array]) -> Tensors:
        """The update over other data: `change` gets the name and contents of each tensor of each shard."""
        loaded = load(lambda name: computed.files[name], read_graph=_graph)
        shards: list[Tensors] = [{n: change(n, array) for n, array in shard.items()} for shard in loaded.shards]
        return self._run(dataclasses.replace(loaded, shards=shards))

    def _run(self, loaded: Loaded) -> dict[str, Array]:
        run = Run(loaded, self._backend)
        while not run.done:
            run.step()
        return run.update()

    def encoded(self, computed: Computed, tensors: Tensors, host: str) -> bytes:
        """The file that a host uploads for these tensors. Raises ContractError if they are not finite."""
        if tensors is computed.tensors and not self.noise:
            data = self._encoded.get(computed.digest)
            if data is None:
                data = _written(computed, tensors)
                self._keep(self._encoded, computed.digest, data)
            return data
        return _written(computed, self._rounded(computed, tensors, host) if self.noise else tensors)

    def _rounded(self, computed: Computed, tensors: Tensors, host: str) -> Tensors:
        draws = seeded("rounding", computed.digest, host)
        return {
            name: (array * (1 + self.noise * draws.standard_normal(array.shape))).astype(array.dtype)
            if name.startswith(MOVING)
            else array
            for name, array in tensors.items()
        }

    def _keep(self, where: OrderedDict[str, Any], key: str, value: Any) -> None:
        where[key] = value
        if len(where) > self._most:
            where.popitem(last=False)


def seeded(*words: str | int) -> np.random.Generator:
    """Draws that depend on nothing but these words."""
    digest = hashlib.sha256("\n".join(map(str, words)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "little"))


def _written(computed: Computed, tensors: Tensors) -> bytes:
    losses = tensors["metric/loss"] / np.maximum(tensors["metric/weight"], 1)
    metadata = {
        "microtask": computed.digest, "base_version": computed.microtask.base_version,
        "steps": computed.microtask.steps, "losses": [round(float(loss), 6) for loss in losses],
        "backend": "simulated",
    }  # fmt: skip
    return write_update(tensors, computed.types, metadata, computed.codec)


class Evaluation:
    """What the server computes itself (evaluations, spot checks), at once instead of in a process of its own."""

    def __init__(self, folder: Path, microtask: Microtask, files: Places, arguments: Sequence[str] = ()) -> None:
        self.folder, self._microtask, self._files = folder, microtask, files

    def finished(self) -> bool:
        return True

    def update(self, types: Mapping[str, TensorType]) -> Update:
        self.folder.mkdir(parents=True, exist_ok=True)
        document = self.folder / "microtask.json"
        document.write_bytes(self._microtask.to_json())
        places = {**self._files, document.name: document}
        run = Run(load(lambda name: places[name], read_graph=_graph), open_backend("numpy", 1))
        while not run.done:
            run.step()
        codec, about = self._microtask.codec, {"microtask": self._microtask.digest()}
        return read_update(write_update(run.update(), types, about, codec), types, codec, self._microtask.digest())

    def stop(self) -> None:
        pass
