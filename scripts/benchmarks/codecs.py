"""Every codec on an update of 4 MB, one thread: speed both ways, bytes a value, what is lost, how replicas part.

The update has matrices of 512 x 512 and smaller whose singular values fall like 1/k, as those of trained networks do,
and vectors: 1,006,208 float32 numbers. Speeds are MB of float32 numbers a second (best of some rounds); bytes a value
are those of the whole file, zstd and header included; `lost` is the relative L2 distance of the decoded update from the
encoded one; `apart` is the relative L2 distance, once decoded, of two updates that were 1e-6, 3e-5 and 1e-3 apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from boinc_project.contract.codecs import Array, Codec, CodecSeed
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import write_update

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embedding": (512, 128),
    **{f"layer_{index}": (512, 512) for index in range(3)},
    "head": (512, 300),
    "bias": (512,),
    "norm": (128,),
}
CODECS: Mapping[str, Codec] = {
    "dense": Codec("dense"),
    "int8": Codec("int8"),
    "fp4": Codec("fp4"),
    "sign": Codec("sign"),
    "qsgd": Codec("qsgd"),
    "qsgd_127": Codec("qsgd", levels=127),
    "random_k": Codec("random-k"),
    "random_k_int8": Codec("random-k", values="int8"),
    "random_k_fp4": Codec("random-k", values="fp4"),
    "low_rank": Codec("low-rank"),
    "low_rank_32": Codec("low-rank", rank=32),
    "low_rank_fixed": Codec("low-rank", iterations=0),
    "top_k": Codec("top-k"),
    "top_k_int8": Codec("top-k", values="int8"),
    "top_k_fp4": Codec("top-k", values="fp4"),
    "dct_top_k": Codec("dct-top-k"),
    "dct_top_k_int8": Codec("dct-top-k", values="int8"),
}
APART = (1e-6, 3e-5, 1e-3)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the fastest counts (default 5)")
    parser.add_argument("--seeds", type=int, default=3, help="updates over which distances are averaged (default 3)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """CODEC_encode and CODEC_decode in MB/s, CODEC_bytes a value, CODEC_lost, CODEC_apart (at 1e-6)."""
    updates = [_update(seed) for seed in range(options.seeds)]
    types = {name: TensorType("float32", array.shape) for name, array in updates[0].items()}
    megabytes = sum(array.nbytes for array in updates[0].values()) / 1e6
    print("| codec | encode, MB/s | decode, MB/s | bytes a value | lost | apart at 1e-6 | 3e-5 | 1e-3 |")
    print("|---" * 8 + "|")
    metrics: dict[str, float] = {}
    with threadpool_limits(1):
        for name, plain in CODECS.items():
            codec = plain.seeded(CodecSeed(1, 2, 3))
            coded = [codec.encode(update) for update in updates]
            decoded = [codec.decode(each, types) for each in coded]
            figures = {
                "encode": megabytes / _fastest(partial(codec.encode, updates[0]), options.rounds),
                "decode": megabytes / _fastest(partial(codec.decode, coded[0], types), options.rounds),
                "bytes": 4 * len(write_update(updates[0], types, {"microtask": "m"}, codec)) / megabytes / 1e6,
                "lost": float(np.mean([_distance(*each) for each in zip(updates, decoded, strict=True)])),
            }
            for apart in APART:
                others = [codec.decode(codec.encode(_near(update, apart)), types) for update in updates]
                distances = [_distance(*each) for each in zip(decoded, others, strict=True)]
                figures[f"apart_{apart:g}"] = float(np.sqrt(np.mean(np.square(distances))))
            shown = " | ".join(f"{value:.3g}" for value in figures.values())
            print(f"| {name} | {shown} |", flush=True)
            kept = ("encode", "decode", "bytes", "lost")
            metrics.update({f"{name}_{key}": figures[key] for key in kept})
            metrics[f"{name}_apart"] = figures["apart_1e-06"]
    return metrics


def _update(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    found: dict[str, Array] = {}
    for name, shape in SHAPES.items():
        if len(shape) == 1:
            array = random.standard_normal(shape)
        else:
            rank = min(shape)
            left, right = random.standard_normal((shape[0], rank)), random.standard_normal((rank, shape[1]))
            array = (left / np.arange(1, rank + 1)) @ right
        found[f"delta/{name}"] = array.astype(np.float32)
    return found


def _near(update: Mapping[str, Array], apart: float) -> dict[str, Array]:
    random = np.random.default_rng(99)
    return {
        name: (array + apart * np.sqrt((array**2).mean()) * random.standard_normal(array.shape)).astype(np.float32)
        for name, array in update.items()
    }


def _distance(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    squares = sum(float(((one[n].astype(np.float64) - other[n]) ** 2).sum()) for n in one)
    return float(np.sqrt(squares / sum(float((one[n].astype(np.float64) ** 2).sum()) for n in one)))


def _fastest(work: Callable[[], Any], rounds: int) -> float:
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)
