"""Policies whose contributions are about parts of the model: what travels, and that nothing is lost of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assimilator.aggregation import fold
from assimilator.contributions import Contribution
from assimilator.replay import replay
from boinc_project.contract import canonical
from boinc_project.contract.canonical import Taker
from boinc_project.contract.codecs import KINDS, PART_KINDS, Codec, CodecSeed, Part
from boinc_project.contract.errors import ContractError, InvalidResult
from boinc_project.contract.graph import Graph, GraphBuilder
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import OpenUpdate, open_update, read_update, write_update
from boinc_project.gt_tables import gt_accepted, gt_microtask
from boinc_project.job_config import JobConfig, JobError
from tests.tiny_project import Changes, TinyProject, exported, tiny_project
from validator.case import Case
from validator.doubts import _accepted
from work_generator.publish import check_parts

SHAPES = {"a": (70, 100), "b": (3,), "c": (), "d": (0, 4), "e": (5000,)}
TYPES = {f"delta/{name}": TensorType("float32", shape) for name, shape in SHAPES.items()}


def values(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {name: np.asarray(generator.standard_normal(kind.shape), np.float32) for name, kind in TYPES.items()}


def sent(tensors: dict[str, Any], codec: Codec) -> bytes:
    return write_update(tensors, TYPES, {"microtask": "m"}, codec)


def codec_of(part: Part, kind: str = "dense", slot: int = 0, version: int = 3) -> Codec:
    return Codec(kind, compression="none", part=part, seed=CodecSeed(1, version, slot))


@pytest.mark.parametrize("by", PART_KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_of_a_version_together_are_the_whole_update_each_value_once(by: str, count: int) -> None:
    tensors = values(1)
    total = {name: np.zeros(kind.shape, np.float32) for name, kind in TYPES.items()}
    touched = {name: np.zeros(kind.shape, np.int64) for name, kind in TYPES.items()}
    for index in range(count):
        codec = codec_of(Part(index, count, by), slot=index)
        found = read_update(sent(tensors, codec), TYPES, codec, "m").tensors
        for name in TYPES:
            total[name] += found[name]
            touched[name] += found[name] != 0
    for name in TYPES:
        np.testing.assert_array_equal(total[name], tensors[name])
        assert (touched[name] == 1).all()


@pytest.mark.parametrize("by", PART_KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_part_are_what_decoding_gives_bit_for_bit(kind: str, by: str) -> None:
    codec = codec_of(Part(1, 3, by), kind)
    data = sent(values(2), codec)
    update, decoded = open_update(data, TYPES, codec, "m"), read_update(data, TYPES, codec, "m").tensors
    for name, whole in decoded.items():
        found = np.full(whole.size, np.nan, np.float32)
        for where, piece in update.pieces(name):
            found[where] = piece
        assert found.tobytes() == whole.tobytes()


@pytest.mark.parametrize("by", PART_KINDS)
def test_a_part_costs_its_share_of_the_bytes(by: str) -> None:
    whole = len(sent(values(3), codec_of(Part())))
    assert max(len(sent(values(3), codec_of(Part(i, 4, by)))) for i in range(4)) < whole * (
        0.65 if by == "tensors" else 0.3
    )


def test_which_values_go_together_changes_with_the_version() -> None:
    def places(version: int) -> Any:
        codec = codec_of(Part(0, 4, "elements"), version=version)
        return read_update(sent(values(4), codec), TYPES, codec, "m").tensors["delta/e"] != 0

    assert any((places(0) != places(version)).any() for version in range(1, 5))


@given(st.integers(-2, 10), st.integers(-1, 10), st.sampled_from(["tensors", "elements", "x"]))
def test_parts_that_do_not_exist_are_refused(index: int, count: int, by: str) -> None:
    good = by in PART_KINDS and count >= 1 and 0 <= index < count
    document = {**Codec().to_document(), "part": {"index": index, "count": count, "by": by}}
    taker = Taker(canonical.loads(canonical.dumps(document), "codec", ContractError), "codec", ContractError)
    if good:
        assert Codec.from_document(taker).part == Part(index, count, by)
    else:
        with pytest.raises(ContractError):
            Codec.from_document(taker)


def test_a_codec_of_whole_updates_has_the_document_it_always_had() -> None:
    assert Codec().to_document() == {"kind": "dense", "block": 256, "compression": "zstd"}


@pytest.mark.parametrize("by", PART_KINDS)
def test_an_update_of_another_part_is_refused(by: str) -> None:
    mine, other = codec_of(Part(0, 3, by)), codec_of(Part(1, 3, by))
    data = sent(values(5), other)
    if by == "tensors" or any(
        mine.part.inner(k.shape, n, mine.seed) != other.part.inner(k.shape, n, mine.seed) for n, k in TYPES.items()
    ):
        with pytest.raises(InvalidResult):
            read_update(data, TYPES, mine, "m")


def contributions(parts: Sequence[int], count: int, by: str) -> list[Contribution]:
    made = []
    for slot, index in enumerate(parts):
        codec = codec_of(Part(index, count, by), slot=slot)
        data = sent(values(slot), codec)

        def load(data: bytes = data, codec: Codec = codec) -> OpenUpdate:
            return open_update(data, TYPES, codec, "m")

        made.append(Contribution(slot, slot + 1, load, part=index))
    return made


def test_every_value_is_the_mean_over_those_who_sent_it() -> None:
    parts = [0, 1, 2, 0, 1, 2]
    folded = fold(contributions(parts, 3, "elements"))
    for name in SHAPES:
        weighted, weights = np.zeros(SHAPES[name]), np.zeros(SHAPES[name])
        for slot, index in enumerate(parts):
            codec = codec_of(Part(index, 3, "elements"), slot=slot)
            there = read_update(sent(values(slot), codec), TYPES, codec, "m").tensors[f"delta/{name}"]
            weighted += (slot + 1) * there.astype(float)
            weights += (slot + 1) * (there != 0)
        np.testing.assert_allclose(folded.gradient[name], weighted / weights, rtol=1e-6)


def test_a_fragment_leaves_the_other_parameters_out_of_the_step() -> None:
    whole = set()
    for index in range(3):
        folded = fold(contributions([index] * 2, 3, "tensors"))
        whole |= {(name, index) for name in folded.gradient}
    assert sorted(name for name, _ in whole) == sorted(SHAPES) and len({index for _, index in whole}) > 1


PARTS: dict[str, Changes] = {
    name: (('policy = "diloco"', f'policy = "{name}"'), ("[schedule]", "[aggregation]\nparts = 2\n[schedule]"))
    for name in ("streaming-diloco", "partition")
}


@pytest.fixture(params=PARTS)
def project(request: pytest.FixtureRequest) -> Iterator[TinyProject]:
    with tiny_project("diloco.toml", changes=PARTS[request.param]) as made:
        yield made


def test_a_job_of_parts_trains_every_parameter_and_replays_to_the_same_bytes(project: TinyProject) -> None:
    start = project.job.folder.read_state(0, project.version_digests()[0])
    moved = []
    for version in range(1, 3):
        project.make_version()
        state = project.job.folder.read_state(version, project.version_digests()[version])
        moved.append({name for name in state if (state[name] != start[name]).any()})
        start = state
    assert moved[0] | moved[1] == set(start)
    if project.job.config.train.policy == "streaming-diloco":
        assert not moved[0] & moved[1], "a fragment a version"
    else:
        assert moved[0] == moved[1] == set(start)
    assert list(replay(project.db, project.job).values()) == project.version_digests()
    parts = [project.microtask_of(str(t["workunit_name"])).codec.part.index for t in project.rows(gt_microtask)]
    assert parts == ([0, 0, 1, 1] if project.job.config.train.policy == "streaming-diloco" else [0, 1, 1, 0])


def test_a_part_survives_the_seed_of_its_microtask() -> None:
    codec = codec_of(Part(1, 3, "elements"))
    assert codec.seeded(CodecSeed(9, 9, 9)).part == codec.part
    assert replace(codec, part=Part()).part.count == 1


def lopsided(*sizes: int) -> Graph:
    build = GraphBuilder()
    for number, size in enumerate(sizes):
        value = build.input(f"parameter/{number}", "parameter", "float32", [size])
        build.output(f"gradient/{number}", "gradient", value)
    return build.build()


@pytest.mark.parametrize(
    ("sizes", "parts", "most"), [((60, 10, 10, 10, 10), 4, 3), ((1, 1), 1024, 2), ((90, 5, 1), 3, 2)]
)
def test_a_job_with_a_fragment_of_no_tensor_is_refused(sizes: tuple[int, ...], parts: int, most: int) -> None:
    config = exported("diloco.toml", PARTS["streaming-diloco"])[0].config

    def of(count: int) -> JobConfig:
        return replace(config, aggregation=replace(config.aggregation, parts=count))

    with pytest.raises(JobError, match=f"write parts = {most}$"):
        check_parts(of(parts), lopsided(*sizes))
    check_parts(of(most), lopsided(*sizes))
    assert of(parts).fragments == parts


def test_a_part_that_does_not_move_is_honest_work(project: TinyProject) -> None:
    """The bias before a batch norm, or the factor of an adapter beside one of zeros, may be all that a part holds."""
    for result in project.issue():
        project.answer(result, project.changed_update(project.unit_of(result), np.zeros_like))
    project.transitioner.run_once()
    project.validator().one_pass()
    project.assimilator().one_pass()
    assert project.job.current_version == 1


def test_the_size_of_a_fragment_s_updates_is_compared_with_its_own() -> None:
    guarded = ("[workunit]", "[trust]\nnorm_bound = 1.5\n\n[workunit]")
    with tiny_project("diloco.toml", changes=(*PARTS["streaming-diloco"], guarded)) as project:
        unit = project.unit_of(project.issue()[0])
        with project.db.transaction() as connection:
            names = [{"workunit_name": str(n), "job_id": 1, "version": n, "norm": 1e-9 if n % 2 else 1.0, "gain": None,
                      "judge_time": n} for n in range(40)]  # fmt: skip
            connection.execute(gt_accepted.insert(), names)
        with project.db.read() as connection:
            for version in (0, 1):
                case = Case(unit, [], {"version": version}, project.job)
                assert {norm for _, norm, _ in _accepted(connection, case)} == {1e-9 if version else 1.0}
