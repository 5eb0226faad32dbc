"""The OpenCL backend: graphs on any OpenCL 1.1 device, with the project's own kernels (kernels/*.cl).

device.py        which device, and what it can do
programs.py      a kernel from a file and its defines, built once and cached
values.py        where a value lies in device memory, and how a kernel is launched on it
emitter.py       turns nodes into launches (`lower`), remembers what they read and write
<family>.py      one lowering function for each operator: elementwise, movement, reductions, ...
memory.py        storages with their lifetimes -> places in a few arenas
plan.py          a whole graph: lower, fuse, place, bind; run
opencl_backend   the backend that the executor and the app see
"""

import os

# Read when PyOpenCL is imported: its own caches are pickles in the home folder, where we neither read nor write.
os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
