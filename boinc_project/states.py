"""The states of BOINC's database rows, with BOINC's values and meanings.

Sources: BOINC `db/boinc_db_types.h`, `lib/common_defs.h`. Values are stored in the database as plain
integers; every enumeration here is an `int`, so rows compare with members directly.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

#: `workunit.transition_time` of a workunit that needs no transition (the largest 32-bit integer).
NEVER = 2147483647

#: Exit status of a task that its user aborted; the transitioner does not count it as an error.
EXIT_ABORTED_VIA_GUI = 203

#: Exit status of a task that the project aborted; it costs the host no quota.
EXIT_ABORTED_BY_PROJECT = 202


#: Exit statuses of tasks that ended for no fault of their own: not begun before the deadline, ended by project or user.
EXITS_WITHOUT_FAULT = (200, EXIT_ABORTED_BY_PROJECT, EXIT_ABORTED_VIA_GUI)

#: Numbers for the programs of volunteers' own, for each app (host_app_version.app_version_id).
ANONYMOUS_SPAN = 1_000_000


def host_version_id(appid: int, app_version_id: int) -> int:
    """host_app_version.app_version_id of a result: its app version, or a number made from app and resource for the
    anonymous platform, whose numbers are negative (sched/sched_version.cpp)."""
    return app_version_id if app_version_id >= 0 else appid * ANONYMOUS_SPAN - app_version_id


class ServerState(IntEnum):
    """`result.server_state`: where one instance of a workunit is."""

    INACTIVE = 1  # waits for a size-class feeder; never sent without one
    UNSENT = 2  # may be given to a host
    IN_PROGRESS = 4  # a host has it
    OVER = 5  # ended; `outcome` says how


class Outcome(IntEnum):
    """`result.outcome`: how an instance ended; meaningful once it is OVER."""

    INIT = 0  # not over yet
    SUCCESS = 1  # the client computed and uploaded it
    COULDNT_SEND = 2  # no host could be given it
    CLIENT_ERROR = 3  # the client reported an error (download, run, upload, abort)
    NO_REPLY = 4  # the deadline passed; may still turn into SUCCESS by a late report
    DIDNT_NEED = 5  # never sent, no longer needed
    VALIDATE_ERROR = 6  # reported as success, but its files cannot be judged
    CLIENT_DETACHED = 7  # the client left the project or lost its state


class ValidateState(IntEnum):
    """`result.validate_state`: what the validator thinks of a successful instance."""

    INIT = 0  # not judged yet
    VALID = 1  # agrees with the canonical result; credited
    INVALID = 2  # does not agree, or is an error
    NO_CHECK = 3  # the workunit failed; nobody will look
    INCONCLUSIVE = 4  # compared, but no quorum yet
    TOO_LATE = 5  # arrived after the canonical result's files were deleted


class AssimilateState(IntEnum):
    """`workunit.assimilate_state`."""

    INIT = 0  # not ready
    READY = 1  # the assimilator must handle it
    DONE = 2  # handled


class FileDeleteState(IntEnum):
    """`workunit.file_delete_state` (inputs) and `result.file_delete_state` (outputs)."""

    INIT = 0  # files may still be needed
    READY = 1  # the file deleter may remove them
    DONE = 2  # removed
    ERROR = 3  # could not be removed; tried again later


class ClientState(IntEnum):
    """`result.client_state`: how far the client got, as it reported."""

    NEW = 0
    FILES_DOWNLOADING = 1  # an error in this state: a download failed
    FILES_DOWNLOADED = 2
    COMPUTE_ERROR = 3
    FILES_UPLOADING = 4
    FILES_UPLOADED = 5  # together with exit status 0: success
    ABORTED = 6
    UPLOAD_FAILED = 7


class ErrorMask(IntFlag):
    """`workunit.error_mask`: why a workunit failed; several may be set."""

    NONE = 0
    COULDNT_SEND_RESULT = 1  # an instance could be sent to no host
    TOO_MANY_ERROR_RESULTS = 2  # more than max_error_results errors
    TOO_MANY_SUCCESS_RESULTS = 4  # more than max_success_results successes without agreement
    TOO_MANY_TOTAL_RESULTS = 8  # max_total_results used up
    CANCELLED = 16  # cancelled by the project
    NO_CANONICAL_RESULT = 32  # assimilation was asked for without a canonical result


class TransitionerFlags(IntEnum):
    """`workunit.transitioner_flags`."""

    NORMAL = 0
    NONE = 1  # the transitioner ignores the workunit (broadcast jobs)
    NO_NEW_RESULTS = 2  # handled, but no instances are made (targeted jobs)
