"""Leaves what has been imported out of garbage collection: forked processes share its memory."""

import gc

gc.freeze()
