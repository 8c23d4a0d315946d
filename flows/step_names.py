"""Names of the steps of a run, in their order; `graphs` and `checkpoint` run in the background."""

# Before there is a run folder.
PREPARATION = ("plan", "graphs", "resolve", "tokenizer", "checkpoint", "dataset")
STEPS = (*PREPARATION, "reference", "train", "evaluate", "export")
