"""Builds the application versions that volunteers download."""
