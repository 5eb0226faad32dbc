"""From results to validated gradients: sanity, agreement, credit."""
