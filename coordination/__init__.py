"""How rank manifests become one view of all ranks."""
