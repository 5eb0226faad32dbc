"""Which exceptions are a user's mistake."""

from __future__ import annotations


class Mistake(Exception):
    """The user must change something; the message is one sentence that says what."""


def user_mistakes() -> tuple[type[BaseException], ...]:
    """Exception classes whose message is meant for the user."""
    from apps.packaging.build import BuildError
    from boinc_project.app_versions import AppVersionError
    from boinc_project.config import ConfigError
    from boinc_project.contract.errors import ContractError
    from boinc_project.job_config import JobError
    from boinc_project.local_run import LocalRunFailed
    from boinc_project.project_tree import ImmutableNameError
    from boinc_project.server.run import ServerError
    from boinc_project.standard.record import InstallError
    from boinc_project.templates import TemplateError

    return (
        Mistake,
        AppVersionError,
        BuildError,
        ConfigError,
        ContractError,
        ImmutableNameError,
        InstallError,
        JobError,
        LocalRunFailed,
        ServerError,
        TemplateError,
    )
