"""Names of the steps of a run, in their order; `graphs` and `checkpoint` run in the background."""

PREPARATION = (
    "plan",
    "graphs",
    "resolve",
    "tokenizer",
    "checkpoint",
    "dataset",
)  # before there is a run folder
STEPS = (*PREPARATION, "reference", "train", "evaluate", "export")
