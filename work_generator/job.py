"""The admin's job with everything loaded: settings, model, loss, metrics and data.

What it is: the place where the admin's Python code runs, with their mistakes turned into sentences. What it
is not: the reader of job.toml (boinc_project/job_config.py), the export (export/) or the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from boinc_project.job_config import METRIC_NAME, JobConfig, JobError, load_config, one_line
from work_generator.references import admins_code, load_reference

if TYPE_CHECKING:
    import torch

__all__ = ["Job", "JobConfig", "JobError", "load_config"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job ready to be exported: settings, model, functions and data.

    `data` maps split -> field -> tensor [N, ...] (float32, int64, int32, uint8 or bool, on the CPU);
    fields, dtypes and shapes beyond N are the same in every split. `notes` are sentences worth
    telling the admin, for example that an array was converted.
    """

    config: JobConfig
    model: torch.nn.Module
    loss: Callable[..., Any]
    metrics: Callable[..., Any] | None
    data: Mapping[str, Mapping[str, torch.Tensor]]
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.config.folder

    @staticmethod
    def load(source: Path | JobConfig) -> Job:
        """Load what job.toml names. Raises JobError with the admin's file and line where their code fails."""
        config = source if isinstance(source, JobConfig) else load_config(source)
        functions = {
            name: load_reference(config.folder, reference)
            for name, reference in (
                ("loss", config.model.loss),
                ("metrics", config.model.metrics),
                ("data", config.data.source),
            )
            if reference is not None
        }
        model = load_model(config)
        with admins_code(config.folder, f'the data source "{config.data.source}"'):
            found = functions["data"]()
        data, notes = checked_data(found, config)
        return Job(
            config=config,
            model=model,
            loss=functions["loss"],
            metrics=functions.get("metrics"),
            data=data,
            notes=tuple(notes),
        )


def load_model(config: JobConfig) -> torch.nn.Module:
    """The admin's model with seeded initial weights, or those of [model] pretrained."""
    import torch

    factory = load_reference(config.folder, config.model.factory)
    with (
        torch.random.fork_rng(devices=[]),
        admins_code(config.folder, f'the model factory "{config.model.factory}"'),
    ):
        torch.manual_seed(config.job.seed)
        model = factory()
    if not isinstance(model, torch.nn.Module):
        raise JobError(
            f'the model factory "{config.model.factory}" returned {type(model).__name__}; return a torch.nn.Module'
        )
    for name, tensor in model.named_parameters():
        if tensor.dtype != torch.float32:
            raise JobError(
                f'parameter {name} of "{config.model.factory}" is {tensor.dtype}; volunteers compute in float32: '
                "return model.float()"
            )
        if tensor.device.type != "cpu":
            raise JobError(
                f'parameter {name} of "{config.model.factory}" is on {tensor.device}; return the model on the CPU'
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(
            f'the model of "{config.model.factory}" has no parameter that requires a gradient; nothing can be trained'
        )
    if config.model.pretrained is not None:
        _load_pretrained(model, config.folder / config.model.pretrained)
    return model


def _load_pretrained(model: torch.nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(str(path))
    except (OSError, SafetensorError, ValueError) as error:
        raise JobError(
            f"pretrained weights {path} cannot be read ({one_line(error)}); give a safetensors file"
        ) from error
    wanted = model.state_dict()
    # Tied weights are stored once by most writers; whichever name is there fills all names of the tensor.
    by_storage = {name: tensor.data_ptr() for name, tensor in wanted.items()}
    filled = {by_storage[name] for name in weights if name in by_storage}
    missing = [name for name in wanted if name not in weights and by_storage[name] not in filled]
    unknown = [name for name in weights if name not in wanted]
    if missing or unknown:
        part = f"lack {missing[0]}" if missing else f"have {unknown[0]}, which the model does not"
        more = len(missing) + len(unknown) - 1
        raise JobError(
            f"pretrained weights {path} {part}{f' (and {more} more names differ)' if more else ''}; "
            "save them with the state_dict of this model"
        )
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise JobError(
                f"pretrained weights {path}: {name} has shape {list(tensor.shape)}, the model's has "
                f"{list(wanted[name].shape)}; save them with the state_dict of this model"
            )
    model.load_state_dict(weights, strict=False)


def checked_data(found: object, config: JobConfig) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """The admin's data as plain tensors, and notes on what was converted. Raises JobError for what cannot be used."""
    source = f'the data source "{config.data.source}"'
    if not isinstance(found, Mapping) or not found:
        raise JobError(
            f'{source} returned {type(found).__name__}; return {{"train": {{"x": array, ...}}, "test": {{...}}}}'
        )
    if "train" not in found:
        raise JobError(f'{source} has no split "train" (it has {", ".join(map(str, found))}); name one split "train"')
    if config.train.evaluate_every and "test" not in found:
        raise JobError(f'{source} has no split "test" for held-out evaluation; add one or set evaluate_every = 0')
    if config.trust.loss_probe and "test" not in found:
        raise JobError(f'{source} has no split "test" for loss_probe in [trust]; add one or remove loss_probe')
    notes: list[str] = []
    data: dict[str, dict[str, torch.Tensor]] = {}
    for split, fields in found.items():
        if not isinstance(split, str) or not METRIC_NAME.fullmatch(split):
            raise JobError(f"{source} has a split named {split!r}; use letters, digits and _")
        if not isinstance(fields, Mapping) or not fields:
            raise JobError(f'{source}: split "{split}" is {type(fields).__name__}; make it a dict of field -> array')
        data[split] = {
            _checked_field_name(name, split, source): _checked_array(array, f'{source}: "{split}"/"{name}"', notes)
            for name, array in fields.items()
        }
        _check_lengths(data[split], split, source)
    for split, fields in data.items():
        _check_same_fields(data["train"], fields, split, source)
    return data, notes


def _checked_field_name(name: object, split: str, source: str) -> str:
    if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
        raise JobError(f'{source}: split "{split}" has a field named {name!r}; use letters, digits and _')
    return name


def _checked_array(array: object, place: str, notes: list[str]) -> torch.Tensor:
    import torch

    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu()
    elif isinstance(array, np.ndarray) and array.dtype.kind in "fiub":
        native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
        tensor = torch.from_numpy(
            native.astype(np.int64) if native.dtype.kind == "u" and native.itemsize > 1 else native
        )
        if tensor.dtype == torch.int64 and native.dtype.kind == "u":
            notes.append(f"{place} was converted from {native.dtype} to int64")
    else:
        kind = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise JobError(f"{place} is {kind}; give a numpy array or tensor of numbers")
    wanted = tensor.dtype
    if tensor.is_complex():
        raise JobError(f"{place} is complex; give real and imaginary parts as two fields")
    if tensor.is_floating_point():
        wanted = torch.float32
    elif tensor.dtype not in (torch.int64, torch.int32, torch.uint8, torch.bool):
        wanted = torch.int64
    if wanted != tensor.dtype:
        notes.append(f"{place} was converted from {str(tensor.dtype)[6:]} to {str(wanted)[6:]}")
    tensor = tensor.to(wanted).contiguous()
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise JobError(f"{place} has values that are NaN or infinite; clean the data")
    return tensor.clone() if not isinstance(array, np.ndarray) or wanted == tensor.dtype else tensor


def _check_lengths(fields: Mapping[str, torch.Tensor], split: str, source: str) -> None:
    for name, tensor in fields.items():
        if tensor.dim() == 0:
            raise JobError(
                f'{source}: "{split}"/"{name}" is a single number; its first dimension must count the samples'
            )
    counts = {name: tensor.shape[0] for name, tensor in fields.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise JobError(
            f'{source}: the fields of "{split}" differ in their number of samples ({shown}); make them equal'
        )
    if not next(iter(counts.values())):
        raise JobError(f'{source}: split "{split}" has no samples; give at least one')


def _check_same_fields(
    train: Mapping[str, torch.Tensor], fields: Mapping[str, torch.Tensor], split: str, source: str
) -> None:
    if set(train) != set(fields):
        raise JobError(
            f'{source}: split "{split}" has the fields {", ".join(sorted(fields))}, "train" has '
            f"{', '.join(sorted(train))}; make them the same"
        )
    for name, tensor in fields.items():
        other = train[name]
        if tensor.dtype != other.dtype or tensor.shape[1:] != other.shape[1:]:
            raise JobError(
                f'{source}: "{split}"/"{name}" is {str(tensor.dtype)[6:]} {list(tensor.shape[1:])} per sample, '
                f'in "train" {str(other.dtype)[6:]} {list(other.shape[1:])}; make them the same'
            )
