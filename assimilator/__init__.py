"""From validated gradients to model versions: intake, aggregation, publishing."""
