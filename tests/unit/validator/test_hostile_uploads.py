"""Hostile uploads: each refused by the name of its fault, quickly, in little memory, without running anything."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boinc_project.contract import canonical, tensorfile
from boinc_project.contract.codecs import Codec
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import FORMAT, write_update
from tests.tiny_project import volunteer_environment

DIGEST = "c" * 64
SHAPE = (250, 1000)
GOOD = {"gradient/w": np.full(SHAPE, 0.5, np.float32), "metric/loss": np.ones(2, np.float32)}
METADATA = json.dumps({"format": FORMAT, "microtask": DIGEST})

# Judges every file of a folder as the validator does and prints fault, CPU seconds and peak memory of each.
JUDGE = """
import json, resource, sys, time
from pathlib import Path
from boinc_project.config import ProjectConfig
from boinc_project.contract.codecs import Codec
from boinc_project.contract.errors import InvalidResult
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import max_update_bytes, read_update
from boinc_project.project_tree import ProjectTree
from validator.sanity import read_output

class Tree:
    class config:
        upload_dir = Path(sys.argv[1])

types = {"gradient/w": TensorType("float32", (250, 1000)), "metric/loss": TensorType("float32", (2,))}
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = {}
for path in sorted(Path(sys.argv[1]).iterdir()):
    codec = Codec("dense", 256, "zstd" if path.suffix == ".zst" else "none")
    start = time.process_time()
    try:
        data = read_output(Tree, path, max_update_bytes(types, codec))
        read_update(data, types, codec, sys.argv[2])
        fault = "none"
    except InvalidResult as error:
        fault = error.fault
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024
    found[path.name] = (fault, time.process_time() - start, grown)
print(json.dumps(found))
"""


class Canary:
    """Unpickling this would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def raw(header: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps({"__metadata__": {"boinc_train": METADATA}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + body


def good_header() -> tuple[dict[str, Any], bytes]:
    data = tensorfile.to_bytes(GOOD, json.loads(METADATA))
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    return header, data[8 + length :]


def hostile_files(canary: Path) -> dict[str, tuple[str, bytes]]:
    """File name -> (fault it must be refused for, contents)."""
    header, body = good_header()
    w, loss = header["gradient/w"], header["metric/loss"]
    size = len(body)
    pickled = pickle.dumps(Canary(canary))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3\n")

    def with_w(**changes: Any) -> bytes:
        return raw({"gradient/w": {**w, **changes}, "metric/loss": loss}, body)

    packed = canonical.compress(raw(header, body))
    claimed = packed[:4] + bytes([0b1110_0100]) + (10 << 30).to_bytes(8, "little") + packed[9:]
    whole = raw(header, body)
    return {
        "header_2_to_63": ("header_too_long", struct.pack("<Q", 2**63) + b"{}"),
        "header_200_mb": ("header_too_long", struct.pack("<Q", 200 << 20) + b"{}"),
        "overlap": ("offsets", with_w(data_offsets=[0, size - 8]) if w["data_offsets"][0] else with_w(
            data_offsets=[4, 4 + w["data_offsets"][1]])),
        "gap": ("offsets", raw({"gradient/w": {**w, "data_offsets": [16, 16 + 1_000_000]}, "metric/loss": {
            **loss, "data_offsets": [0, 8]}}, bytes(1_000_016))),
        "trailing": ("trailing_bytes", whole + b"x"),
        "shape_of_16_bytes": ("shape", raw({"gradient/w": {**w, "shape": [1000, 1000], "data_offsets": [0, 16]},
                                            "metric/loss": loss}, body)),
        "right_shape_on_16_bytes": ("offsets", raw({"gradient/w": {**w, "data_offsets": [0, 16]},
                                                    "metric/loss": loss}, body)),
        "unknown_dtype": ("dtype", with_w(dtype="Q7")),
        "float64": ("dtype", with_w(dtype="F64")),
        "extra_tensor": ("extra_tensor", raw({**header, "x": {"dtype": "U8", "shape": [0],
                                                              "data_offsets": [size, size]}}, body)),
        "missing_tensor": ("missing_tensor", raw({"metric/loss": {**loss, "data_offsets": [0, 8]}}, bytes(8))),
        "empty_object": ("missing_tensor", struct.pack("<Q", 2) + b"{}"),
        "path_as_name": ("extra_tensor", raw({**header, "../../x": {"dtype": "U8", "shape": [0],
                                                                    "data_offsets": [size, size]}}, body)),
        "pickle.safetensors": ("header_too_long", pickled),
        "torch.safetensors": ("header_too_long", archive.getvalue()),
        "gzip_bomb": ("header_too_long", gzip.compress(bytes(64 << 20), 9)),
        "zstd_bomb.zst": ("too_large", canonical.compress(bytes(128 << 20))),
        "zstd_lying.zst": ("too_large", claimed),
        "zstd_trailing.zst": ("trailing_bytes", packed + packed),
        "many_values": ("too_large", raw({f"{n:x}": 0 for n in range(60_000)})[:8] + b"{" + b"{}," * 300_000),
        "deep": ("depth", struct.pack("<Q", 400_000) + b"[" * 400_000),
        "nothing": ("empty", b""),
        "half": ("truncated", whole[: len(whole) // 2]),
        "larger_than_allowed": ("too_large", bytes(2_000_000)),
        "not_finite": ("not_finite", whole.replace(np.float32(0.5).tobytes(), np.float32("nan").tobytes(), 1)),
        "other_microtask": ("wrong_microtask", whole.replace(DIGEST.encode(), b"d" * 64)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("uploads")
    canary = tmp_path_factory.mktemp("canary") / "code_ran"
    files = hostile_files(canary)
    for name, (_, data) in files.items():
        (folder / name).write_bytes(data)
    (folder / "good").write_bytes(
        write_update(
            GOOD,
            {"gradient/w": TensorType("float32", SHAPE), "metric/loss": TensorType("float32", (2,))},
            {"microtask": DIGEST},
            Codec("dense", 256, "none"),
        )
    )
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    done = subprocess.run(
        [sys.executable, "-c", JUDGE, str(folder), DIGEST],
        env=volunteer_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return files, json.loads(done.stdout), canary


def test_every_hostile_file_is_refused_by_the_name_of_its_fault(judged: Any) -> None:
    files, found, _ = judged
    expected = {**{name: fault for name, (fault, _) in files.items()}, "good": "none"}
    expected |= {"folder": "not_a_file", "pipe": "not_a_file"}
    assert {name: fault for name, (fault, _, _) in found.items()} == expected


def test_no_hostile_file_takes_a_second_of_computing_or_200_mb(judged: Any) -> None:
    _, found, _ = judged
    assert {name: seconds for name, (_, seconds, _) in found.items() if seconds > 1} == {}
    assert max(grown for _, _, grown in found.values()) < 200


def test_no_code_of_an_upload_is_run(judged: Any) -> None:
    assert not judged[2].exists()
