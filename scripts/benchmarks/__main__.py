"""`python -m scripts.benchmarks NAME [options]`: run one measurement; its last line is a JSON object."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

from scripts.benchmarks.common import BenchmarkSkipped, machine

#: Name of a measurement (and of its module) -> what it says.
BENCHMARKS = {
    "agreement": "how far honest copies drift apart across numpy, PyTorch and OpenCL, and what must be told from them",
    "aggregate": "robust rules on 25 contributions of 300,000 numbers against byzfl's, one thread each",
    "assimilator": "workunits taken in per second, and updates of 1,000,000 parameters folded per second, on MariaDB",
    "byzantine": "accuracy and accepted lies under attack: rules against byzfl's, and the whole system, simulated",
    "bytes": "bytes until a loss on 8 simulated hosts against PyTorch DDP on the same batches",
    "churn": "goodput and loss when half of the simulated hosts leave for good",
    "codec-training": "what each codec costs in training: the digits example with 8 hosts, against dense",
    "codecs": "every codec on an update of 4 MB: speed, bytes a value, what is lost, how replicas part",
    "elementwise": "a chain of elementwise operators as one OpenCL kernel against one kernel each",
    "gemm": "matrix products on OpenCL against PyTorch, and the share of the device's peak that they reach",
    "generator": "workunits created per second, their inputs shared, on MariaDB",
    "inner-state": "loss with the inner optimizer's state reset in each task or shipped, at equal tokens and bytes",
    "opencl-step": "forward, backward and AdamW of the GPT example on OpenCL against eager PyTorch",
    "scheduler": "scheduler replies per second, with work and without, at 4 connections",
    "staleness": "loss of the aggregation policies by mean lag, on one arrival trace, simulated",
    "step": "one forward and backward pass of the GPT example against eager PyTorch",
    "turnaround": "from a round's last report to the new version, and to a client that works on it",
    "upload": "speed of a 100 MB upload and the server's memory meanwhile",
    "validator": "workunits judged per second with full bookkeeping, on MariaDB",
}


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: scripts/bench NAME [options]; the names are:")
        for name, about in BENCHMARKS.items():
            print(f"  {name.ljust(15)}{about}")
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        print(f"error: there is no benchmark {name!r}; the names are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"scripts.benchmarks.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"scripts/bench {name}", description=BENCHMARKS[name])
    module.add_options(parser)
    options = parser.parse_args(rest)
    print(f"{name}: {BENCHMARKS[name]}")
    print(machine("before"), flush=True)
    try:
        metrics = module.measure(options)
    except BenchmarkSkipped as skipped:
        print(f"skipped: {skipped}")
        print(json.dumps({"name": name, "metrics": {}, "skipped": str(skipped)}))
        return 0
    print(machine("after"))
    print(json.dumps({"name": name, "metrics": {key: float(f"{value:.5g}") for key, value in metrics.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
