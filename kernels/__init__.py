"""OpenCL kernels of the project (data)."""
