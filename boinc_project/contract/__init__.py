"""What server and volunteer agree on: graphs, tensors, microtasks and updates (numpy and standard library)."""
