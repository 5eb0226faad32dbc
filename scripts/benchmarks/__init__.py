"""The project's measurements, one module each; `scripts/bench` runs them."""
