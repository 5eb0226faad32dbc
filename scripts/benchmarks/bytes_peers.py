"""What one exchange of a model costs in hivemind and in Flower: the bytes that all computers together send.

    hivemind   its averaging of weights (butterfly all-reduce over libp2p), uncompressed, float16 and 8 bits, between
               processes in a network of their own: what that carries, its overhead included (wire.py). It is measured
               with fewer peers and brought to `hosts` by the 2 (n - 1) of an all-reduce
    Flower     FedAvg: every client is sent the weights and sends its own, in Flower's messages, float32

`python -m scripts.benchmarks.bytes_peers PARAMETERS PEERS`, run in a network of its own, prints hivemind's figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.benchmarks import wire
from scripts.benchmarks.common import BenchmarkFailed
from scripts.benchmarks.peers import whole_peer

ROUNDS = 3
COMPRESSIONS = {
    "none": "NoCompression",
    "float16": "Float16Compression",
    "8bit": "Uniform8BitQuantization",
}


def hivemind_bytes(parameters: int, hosts: int, peers: int = 4) -> dict[str, float]:
    """By compression: bytes sent in one exchange of so many parameters between `hosts`. Raises as wire.alone."""
    whole_peer("hivemind")
    carried = wire.alone(__name__, str(parameters), str(peers))
    return {name: value * (hosts - 1) / (peers - 1) for name, value in carried.items()}


def flower_bytes(tensors: Sequence[npt.NDArray[Any]], hosts: int) -> tuple[float, float]:
    """(down, up) of one round of FedAvg with these weights. Raises BenchmarkSkipped without Flower."""
    common, strategy = whole_peer("flwr", "common"), whole_peer("flwr", "server.strategy")
    serde = common.serde
    parameters = common.ndarrays_to_parameters(list(tensors))
    result = common.FitRes(common.Status(common.Code.OK, ""), parameters, 1, {})
    averaged, _ = strategy.FedAvg(fit_metrics_aggregation_fn=lambda _: {}).aggregate_fit(
        1, [(None, result)] * hosts, []
    )
    for mine, given in zip(common.parameters_to_ndarrays(averaged), tensors, strict=True):
        if not np.allclose(mine, given, atol=1e-6):
            raise BenchmarkFailed("Flower's mean of equal weights is not these weights")
    down = serde.fit_ins_to_proto(common.FitIns(averaged, {})).ByteSize()
    return float(hosts * down), float(hosts * serde.fit_res_to_proto(result).ByteSize())


def _measured(parameters: int, peers: int) -> Mapping[str, float]:
    """Bytes that this network carries in one exchange between its peers, median of the rounds."""
    import torch

    hivemind, averaging = whole_peer("hivemind"), whole_peer("hivemind", "averaging")
    compression = whole_peer("hivemind", "compression")
    found = {}
    with _network(hivemind, peers) as network:
        for name, kind in COMPRESSIONS.items():
            with ExitStack() as stack:
                members = []
                for number, table in enumerate(network):
                    values = torch.from_numpy(np.random.default_rng(number).standard_normal(parameters, np.float32))
                    member = averaging.DecentralizedAverager(
                        [values], table, prefix=name, target_group_size=peers, min_group_size=peers,
                        compression=getattr(compression, kind)(), min_matchmaking_time=5.0, request_timeout=2.0,
                        start=True,
                    )  # fmt: skip
                    stack.callback(member.shutdown)
                    members.append(member)
                carried = []
                for _ in range(ROUNDS):
                    before = wire.carried()
                    steps = [member.step(wait=False, timeout=120) for member in members]
                    if any(len(step.result() or ()) != peers for step in steps):
                        raise BenchmarkFailed("hivemind's peers did not find one another")
                    carried.append(wire.carried() - before)
            found[name] = float(np.median(carried))
    return found


@contextmanager
def _network(hivemind: Any, peers: int) -> Iterator[list[Any]]:
    """Distributed hash tables that know one another, one for each peer."""
    with ExitStack() as stack:
        tables: list[Any] = []
        for _ in range(peers):
            known = tables[0].get_visible_maddrs() if tables else ()
            tables.append(hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=known, start=True))
            stack.callback(tables[-1].shutdown)
        yield tables


if __name__ == "__main__":
    wire.bring_up()
    print(json.dumps(_measured(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
