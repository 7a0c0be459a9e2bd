"""Statistics of all tensors, steps and ranks as columns: what rules and queries read."""
