"""Exit codes of the `trainshed` command."""

DONE = 0
FAILED = 1
REJECTED = 2  # invalid input; argparse exits with the same
