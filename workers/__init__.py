"""What runs beside training: hooks, capture, and the uploader process."""
