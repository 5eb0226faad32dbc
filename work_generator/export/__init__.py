"""Export: from the admin's PyTorch model to graphs in the project's opset."""

from work_generator.export.errors import ExportError
from work_generator.export.optimizer import export_optimizer, optimizer_slots
from work_generator.export.program import (
    ExportedGraph,
    ExportedJob,
    export_evaluation,
    export_gradient,
    export_job,
)

__all__ = [
    "ExportError",
    "ExportedGraph",
    "ExportedJob",
    "export_evaluation",
    "export_gradient",
    "export_job",
    "export_optimizer",
    "optimizer_slots",
]
