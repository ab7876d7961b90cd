"""Benchmarks against the peers and against the machine's own limits, in one run (`make bench`)."""
