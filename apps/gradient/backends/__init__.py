"""One table of operators per way of computing: numpy (the reference), torch, OpenCL."""
