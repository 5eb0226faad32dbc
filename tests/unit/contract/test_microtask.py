"""The microtask's document: canonical, and strict against anything else."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project.contract.codecs import CodecSeed
from boinc_project.contract.errors import ContractError
from boinc_project.contract.microtask import MICROTASK_FILE, Microtask, MicrotaskError, essentials
from tests.mutations import VALUES, paths, replaced
from tests.tiny_microtask import microtask_files

TEXT = microtask_files(steps=3, batch=4, features=2)[MICROTASK_FILE]


def changed(*path: Any, value: Any) -> bytes:
    """The document with one value replaced."""
    return json.dumps(replaced(json.loads(TEXT), path, value)).encode()


def with_graphs(*sizes: Any) -> bytes:
    """The document with further graph files for batches of these sizes."""
    document = json.loads(TEXT)
    document["files"].update({f"graph_{size}.json.zst": {"sha256": "0" * 64, "size": 1} for size in sizes})
    return json.dumps(document).encode()


def test_a_microtask_is_read_back_as_it_was_written() -> None:
    microtask = Microtask.from_json(TEXT)
    assert microtask.to_json() == TEXT
    assert microtask.digest() == Microtask.from_json(json.dumps(json.loads(TEXT), indent=2).encode()).digest()
    assert (microtask.steps, microtask.samples, microtask.shard_count) == (3, 12, 1)


@pytest.mark.parametrize(("sizes", "expected"), [((), ()), ((1,), (1,)), ((1, 2), (2, 1))])
def test_graphs_of_equal_parts_of_the_batch_may_travel_along(sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert Microtask.from_json(with_graphs(*sizes)).smaller_batches == expected


def test_more_than_two_smaller_graphs_are_refused() -> None:
    text = microtask_files(steps=1, batch=8, features=2)[MICROTASK_FILE]
    document = json.loads(text)
    document["files"].update({f"graph_{n}.json.zst": {"sha256": "0" * 64, "size": 1} for n in (1, 2, 4)})
    with pytest.raises(MicrotaskError, match="3 smaller graphs") as caught:
        Microtask.from_json(json.dumps(document).encode())
    assert caught.value.fault == "batch"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (changed("format", value="other"), "format"),
        (changed("version", value=2), "format"),
        (changed("mode", value="attack"), "mode"),
        (changed("mode", value="local-steps"), "missing_file"),
        (changed("more", value=1), "unknown_key"),
        (changed("job", value="a\nb"), "name"),
        (changed("job", value="\ud800"), "name"),
        (changed("job", value="x" * 65), "type"),
        (changed("files", "../../etc/passwd", value={"sha256": "0" * 64, "size": 1}), "file_name"),
        (changed("files", "shard_7.safetensors", value={"sha256": "0" * 64, "size": 1}), "file_name"),
        (changed("files", "graph.json.zst", "sha256", value="0" * 63 + "G"), "digest"),
        (changed("files", "graph.json.zst", "sha256", value="0" * 10), "digest"),
        (changed("files", "graph.json.zst", "size", value=2**60), "type"),
        (changed("files", "graph.json.zst", "size", value=-1), "type"),
        (with_graphs(3), "batch"),
        (with_graphs(4), "batch"),
        (with_graphs(8), "batch"),
        (with_graphs(0), "file_name"),
        (with_graphs("02"), "file_name"),
        (with_graphs("2\n"), "file_name"),
        (with_graphs("\u0662"), "file_name"),
        (changed("files", value={}), "batch"),
        (changed("batch_size", value=0), "type"),
        (changed("batch_size", value=3), "type"),
        (changed("batches", 0, "rows", value=[]), "batch"),
        (changed("batches", 0, "rows", value=[1]), "batch"),
        (changed("batches", 0, "rows", value=[0, 1, 2, -3]), "type"),
        (changed("batches", 0, "shards", value=[0, 0, 0, 1]), "batch"),
        (changed("batches", value=[]), "steps"),
        (changed("learning_rates", value=[0.1]), "steps"),
        (changed("learning_rates", value=["0.1", 0.1, 0.1]), "type"),
        (changed("seed", value=-1), "type"),
        (changed("seed", value=2**63), "type"),
        (changed("first_step", value=2**50), "type"),
        (changed("codec", "kind", value="topk"), "codec"),
        (b"{}", "missing_key"),
        (b"[]", "type"),
        (b"\0", "json"),
        (TEXT + b" " * (16 << 20), "too_large"),
        (b'{"batches":[' + b"{}," * 400_000 + b"{}]}", "too_large"),
    ],
)
def test_malformed_microtasks_are_refused_by_name(text: bytes, fault: str) -> None:
    with pytest.raises(ContractError) as caught:
        Microtask.from_json(text)
    assert caught.value.fault == fault
    assert fault == "codec" or isinstance(caught.value, MicrotaskError)


PATHS = paths(json.loads(TEXT))[1:]


@settings(max_examples=400)
@given(st.sampled_from(PATHS), VALUES, st.booleans())
def test_mutated_microtasks_raise_contract_errors_or_are_read_to_the_same_document(
    path: tuple[Any, ...], value: Any, remove: bool
) -> None:
    document = replaced(json.loads(TEXT), path, value, remove=remove)
    try:
        found = Microtask.from_json(json.dumps(document).encode())
    except ContractError:
        return
    assert Microtask.from_json(found.to_json()) == found


@settings(max_examples=200)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 255))
def test_microtasks_with_a_damaged_byte_raise_contract_errors_or_are_read(place: int, byte: int) -> None:
    damaged = bytearray(TEXT)
    damaged[place] = byte
    with contextlib.suppress(ContractError):
        Microtask.from_json(bytes(damaged))


def with_deltas(*numbers: int) -> bytes:
    """The document with further state files of these numbers."""
    document = json.loads(TEXT)
    document["files"].update({f"delta_{n}.safetensors": {"sha256": "0" * 64, "size": 1} for n in numbers})
    return json.dumps(document).encode()


@pytest.mark.parametrize(("numbers", "count"), [((), 0), ((0,), 1), (tuple(range(31)), 31)])
def test_deltas_after_the_keyframe_are_counted(numbers: tuple[int, ...], count: int) -> None:
    assert Microtask.from_json(with_deltas(*numbers)).delta_count == count


@pytest.mark.parametrize("numbers", [(1,), (0, 2), tuple(range(32))])
def test_deltas_with_a_gap_or_too_many_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(MicrotaskError) as caught:
        Microtask.from_json(with_deltas(*numbers))
    assert caught.value.fault == "file_name"


def test_a_codec_draws_by_its_microtask_s_seed_version_and_slot_wherever_it_is_read() -> None:
    microtask = Microtask.from_json(TEXT)
    moved = replace(microtask, slot=5, base_version=7)
    assert moved.codec.seed == CodecSeed(microtask.seed, 7, 5)
    assert essentials(moved.to_json()).codec.seed == Microtask.from_json(moved.to_json()).codec.seed == moved.codec.seed
