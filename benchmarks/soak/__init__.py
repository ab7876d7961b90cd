"""Whether anything is ever lost, wrong, hung or left over: `python -m benchmarks.soak` (`make soak`)."""
