"""What codecs without error feedback cost in training: the digits example, 8 hosts, each codec from the same start.

Nothing is simulated but the hosts: microtasks, the application's runner (numpy), update files and the server's step are
the product's own. `sync`: a version is one AdamW step with the gradients of 8 batches of 32. `diloco`: one outer
Nesterov step with 8 local trainings of 20 AdamW steps. The loss is that of the held-out fifth after the last version,
its mean over seeds; `ratio` is against dense; `bytes` is what one host sends for one version.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.gradient.backends import open_backend
from apps.gradient.runner import Run, load
from assimilator.apply import compute
from assimilator.contributions import Contribution
from assimilator.policies import Round
from boinc_project.contract.microtask import MICROTASK_FILE
from boinc_project.contract.update import open_update, write_update
from boinc_project.job_config import JobConfig, load_config
from boinc_project.job_folder import JobFolder
from scripts.benchmarks.common import REPOSITORY, scratch
from work_generator.export import export_job
from work_generator.job import Job
from work_generator.publish import Publisher, prepare
from work_generator.workunits import make_content

HOSTS = 8
DIGITS = REPOSITORY / "examples" / "digits" / "digits.py"
POLICIES = {
    "sync": 'policy = "sync"\nbatches_per_microtask = 1\n',
    "diloco": 'policy = "diloco"\nlocal_steps = 20\n',
}
OPTIMIZERS = {
    "sync": '[optimizer]\nkind = "adamw"\nlr = 0.003\n',
    "diloco": "[inner_optimizer]\nlr = 0.003\nmax_norm = 1.0\n",
}
CODECS: Mapping[str, str] = {
    "dense": 'kind = "dense"',
    "int8": 'kind = "int8"',
    "fp4": 'kind = "fp4"',
    "sign": 'kind = "sign"',
    "qsgd": 'kind = "qsgd"',
    "random_k_1_4": 'kind = "random-k"\nshare = 0.25',
    "random_k_1_64": 'kind = "random-k"',
    "low_rank": 'kind = "low-rank"',
    "low_rank_fixed": 'kind = "low-rank"\niterations = 0',
    "top_k_1_64": 'kind = "top-k"',
    "top_k_1_16_int8": 'kind = "top-k"\nshare = 0.0625\nvalues = "int8"',
    "dct_top_k_1_16": 'kind = "dct-top-k"\nshare = 0.0625',
    "int8_deltas": 'kind = "int8"\n\n[supply]\nkeyframe_every = 8',
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each codec (default 3)")
    parser.add_argument("--sync-versions", type=int, default=60, help="versions of sync (default 60)")
    parser.add_argument("--diloco-versions", type=int, default=12, help="versions of diloco (default 12)")
    parser.add_argument("--codecs", default=",".join(CODECS), help=f"some of {', '.join(CODECS)} (default: all)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """POLICY_CODEC_loss, _ratio (of the losses, against dense) and _bytes."""
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    chosen = ["dense", *(name for name in options.codecs.split(",") if name != "dense")]
    print("| policy | codec | held-out loss (spread) | ratio to dense | accuracy | bytes a host and version |")
    print("|---" * 6 + "|")
    with scratch("codec-training") as folder:
        for policy in POLICIES:
            versions = options.sync_versions if policy == "sync" else options.diloco_versions
            dense = 0.0
            for name in chosen:
                found = [_trained(folder, policy, name, seed, versions) for seed in range(options.seeds)]
                losses, accuracies, sizes = (np.array(each) for each in zip(*found, strict=True))
                mean = float(losses.mean())
                dense = dense or mean
                spread = f"{losses.min():.3g} to {losses.max():.3g}"
                print(
                    f"| {policy} | {name} | {mean:.3g} ({spread}) | {mean / dense:.2f} | {accuracies.mean():.3f}"
                    f" | {sizes.mean():.0f} |",
                    flush=True,
                )
                prefix = f"{policy}_{name}"
                metrics.update({f"{prefix}_loss": mean, f"{prefix}_ratio": mean / dense})
                metrics[f"{prefix}_bytes"] = float(sizes.mean())
    return metrics


def _config(folder: Path, policy: str, codec: str, seed: int) -> JobConfig:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DIGITS, folder)
    (folder / "job.toml").write_text(
        f'[job]\nname = "codec-training"\ndescription = "A measurement."\nseed = {seed}\n\n'
        '[model]\nfactory = "digits:model"\nloss = "digits:loss"\nmetrics = "digits:metrics"\n\n'
        '[data]\nsource = "digits:data"\nlicense = "CC BY 4.0"\nbatch_size = 32\n\n'
        f"[train]\nmicrotasks_per_version = {HOSTS}\nmax_versions = 1000\n{POLICIES[policy]}\n"
        f"{OPTIMIZERS[policy]}\n[codec]\n{CODECS[codec]}\n"
    )
    return load_config(folder)


def _trained(scratch_folder: Path, policy: str, codec: str, seed: int, versions: int) -> tuple[float, float, float]:
    """(held-out loss, accuracy, bytes of an update) after so many versions."""
    config = _config(scratch_folder / f"{policy}-{codec}-{seed}", policy, codec, seed)
    job = Job.load(config)
    made = export_job(job)
    folder, publisher = JobFolder(config.folder / "job"), Publisher(None, config.job.name)
    facts = prepare(job, made, folder, publisher)
    state, kept = dict(made.state), dict[str, Any]()
    sizes: list[int] = []
    for version in range(versions):
        path, _, _ = folder.write_version(version, state, {})
        published = publisher.state(version, path.read_bytes())
        paths = {file.name: folder.shard_path("train", k) for k, file in enumerate(s.file for s in facts.train)}
        paths |= {facts.graph.name: folder.gradient_graph_path, published.name: path}
        if facts.optimizer is not None:
            paths[facts.optimizer.name] = folder.optimizer_graph_path
        contributions = []
        for slot in range(HOSTS):
            content = make_content(config, facts, version, slot, published)
            document = config.folder / "microtask.json"
            document.write_bytes(content.microtask.to_json())
            where = {name: paths[file.name] for name, file in content.files.items()}
            loaded = load({**where, MICROTASK_FILE: document}.__getitem__)
            run = Run(loaded, open_backend("numpy", 1))
            while not run.done:
                run.step()
            data = write_update(run.update(), loaded.types, {"microtask": loaded.digest}, loaded.microtask.codec)
            sizes.append(len(data))
            opened = partial(open_update, data, loaded.types, loaded.microtask.codec, loaded.digest)
            contributions.append(Contribution(slot, loaded.microtask.samples, opened, version, loaded.microtask.steps))
        round = Round(
            version,
            contributions,
            lambda: ({n: a.copy() for n, a in state.items()}, {n: a.copy() for n, a in kept.items()}),  # noqa: B023
            lambda which: state,  # noqa: B023
            lambda: made.gradient,
        )
        new = compute(config, round)
        state, kept = new.state, new.optimizer
        path.unlink()
    return *_held_out(job, made.state_dict, state), float(np.mean(sizes))


def _held_out(job: Job, names: Mapping[str, str], state: Mapping[str, Any]) -> tuple[float, float]:
    """Loss and accuracy of a state on the held-out data, by PyTorch."""
    job.model.load_state_dict({name: torch.from_numpy(np.array(state[inner])) for name, inner in names.items()})
    batch = dict(job.data["test"])
    with torch.no_grad():
        loss = job.loss(job.model, batch).mean()
        assert job.metrics is not None
        right = job.metrics(job.model, batch)["accuracy"]
    return float(loss), float(right.float().mean())
