"""Whether anything is ever lost, wrong, hung or left over: `python -m tests.soak` (`make soak`)."""
