"""The only place that traces: a PyTorch model becomes graphs in the opset."""
