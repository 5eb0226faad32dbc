"""What the export tells an admin whose model it cannot write in the opset."""

from __future__ import annotations

from boinc_project.job_config import JobError


class ExportError(JobError):
    """The model cannot become a graph: one sentence with the operator, the model's line and a remedy."""
