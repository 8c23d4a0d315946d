"""The profile of tests that depend on shapes and topology, which those of shipped profiles may change."""

from pathlib import Path

PAIR = str(Path(__file__).with_name("pair.yaml"))  # two ranks of tensor parallelism on CPUs
