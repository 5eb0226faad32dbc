"""Entry of the application version that computes with PyTorch: the same program with another backend."""

from __future__ import annotations

from apps.gradient.__main__ import main

if __name__ == "__main__":
    main("torch")
