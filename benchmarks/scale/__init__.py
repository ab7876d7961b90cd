"""What many items and many ranks cost, here and with torch's own storage: `python -m benchmarks.scale`."""
