"""Is one uploaded file what its microtask asked for? (BOINC's init_result, sched/validate_util2.cpp)

`load` reads the files of one result and answers with the decoded update, or with InvalidResult (the
volunteer's file is wrong: outcome VALIDATE_ERROR) or TransientError (our storage is away: judge nothing).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boinc_project import templates
from boinc_project.contract.codecs import Codec
from boinc_project.contract.errors import InvalidResult, TransientError
from boinc_project.contract.microtask import UPDATE_FILE
from boinc_project.contract.update import Update, UpdateForm
from boinc_project.inner_state import objection
from boinc_project.job_config import InnerOptimizerSection
from boinc_project.project_tree import ProjectTree

# Errors of the operating system that say something about our storage, not about the volunteer's file.
_ABSENT = (FileNotFoundError, NotADirectoryError)

_FINE = ("dense", "int8")  # codecs that keep the numbers of a tensor apart
_MANY = 16


@dataclass(frozen=True)
class Payload:
    """A readable update, and the SHA-256 of the file it came from."""

    update: Update
    sha256: str
    path: Path


def load(tree: ProjectTree, result: Mapping[str, Any], form: UpdateForm, microtask_digest: str) -> Payload:
    """Read and check the output of a result. Raises InvalidResult or TransientError."""
    path = output_path(tree, result)
    data = read_output(tree, path, form.max_bytes)
    update = form.read(data, microtask_digest)
    _check_weights(update, form.codec)
    return Payload(update, hashlib.sha256(data).hexdigest(), path)


def output_path(tree: ProjectTree, result: Mapping[str, Any]) -> Path:
    """Where the update of a result was uploaded to; raises InvalidResult if the result names none."""
    name = templates.output_name(str(result["xml_doc_in"] or ""), UPDATE_FILE)
    if not name:
        raise InvalidResult(f"the result names no output file {UPDATE_FILE}", fault="missing_file")
    return tree.upload_path(name)


def read_output(tree: ProjectTree, path: Path, max_bytes: int) -> bytes:
    """The bytes of an uploaded file. InvalidResult if it is absent, no file or too large; TransientError if
    the storage cannot answer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or a pipe of that name would keep us waiting
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidResult(f"{path.name} is not a file", fault="not_a_file")
            if status.st_size > max_bytes:
                raise InvalidResult(f"{path.name} has {status.st_size} bytes, more than {max_bytes}", fault="too_large")
            return _all_of(descriptor, status.st_size)
        finally:
            os.close(descriptor)
    except _ABSENT as error:
        if not tree.has_uploads():
            raise TransientError(f"the upload directory {tree.config.upload_dir} is missing or empty") from error
        raise InvalidResult(f"{path.name} was never uploaded", fault="missing_file") from error
    except OSError as error:
        raise TransientError(f"{path} cannot be read: {error.strerror}") from error


def _all_of(descriptor: int, size: int) -> bytes:
    """What an open file of this size holds; one read takes nearly all of them whole."""
    data = os.read(descriptor, size)
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return data


def _check_weights(update: Update, codec: Codec) -> None:
    """An update without any movement is no gradient, nor is one number everywhere: refused even if all copies agree.

    Of an update that travels in parts one part may not move in all honesty (the bias before a batch norm, the factor of
    an adapter beside one of zeros), and coarse codecs have few numbers.
    """
    moving = [a for name, a in update.tensors.items() if name.startswith(("gradient/", "delta/"))]
    if codec.part.count > 1 or not moving:
        return
    if not any(a.any() for a in moving):
        raise InvalidResult("every element of the update is zero", fault="all_zero")
    if codec.kind in _FINE and sum(a.size for a in moving) >= _MANY:
        first = next(a.reshape(-1)[0] for a in moving if a.size)
        if all((a.reshape(-1)[:_MANY] == first).all() and (a == first).all() for a in moving):
            raise InvalidResult(f"every element of the update is {first:.3g}", fault="constant")


def check_inner_state(update: Update, section: InnerOptimizerSection | None) -> None:
    """Refuse a shipped state of the inner optimizer that no gradients could have made. Raises InvalidResult."""
    reason = "" if section is None else objection(update.tensors, section)
    if reason:
        raise InvalidResult(reason, fault="inner_state")
