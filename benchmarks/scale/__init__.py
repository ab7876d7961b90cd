"""The costs of many items and many ranks, with this package and with torch's storage: `python -m benchmarks.scale`."""
