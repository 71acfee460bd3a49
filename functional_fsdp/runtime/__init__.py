"""The runtime: the only place that touches streams, process groups and tensors."""
