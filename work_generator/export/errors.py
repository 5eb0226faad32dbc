"""What the export tells an admin whose model it cannot write in the opset."""

from __future__ import annotations


class ExportError(ValueError):
    """The model cannot become a graph: one sentence with the operator, the model's line and a remedy."""
