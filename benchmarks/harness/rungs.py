"""The ladder that benchmarks train: eight rungs of three widths, and a target of one layer."""

from profiles.experiments import Ladder

VOCABULARY, SEQUENCE, BATCH, STEPS = 512, 32, 16, 1953
WIDTHS = {16: [17, 34, 68], 32: [3.4, 6.8, 11], 48: [1.8, 3.6]}
OVERRIDES = [
    "model.hidden_size=64", "model.intermediate_size=168", "model.num_hidden_layers=1", "model.num_attention_heads=4",
    "model.num_key_value_heads=1", "model.head_dim=16", f"model.vocab_size={VOCABULARY}",
    f"tokenizer.vocabulary_size={VOCABULARY}", "model.parametrization=completep", "model.base_hidden_size=64",
    "model.base_num_hidden_layers=1", "parallel.tensor=1", "cluster.devices_per_node=1", "cluster.threads=1",
    "compile.enabled=false", "train.precision=float32", f"train.sequence_length={SEQUENCE}",
    f"train.global_batch_size={BATCH}", f"train.micro_batch_size={BATCH}", f"train.steps={STEPS}", "train.warmup_steps=98",
    "train.learning_rate=8e-3", "train.minimum_learning_rate=4e-4",
]  # fmt: skip


def ladder(name: str, *overrides: str) -> Ladder:
    """The ladder, with further settings of all its runs."""
    rungs = [{"hidden_size": width, "tokens_per_parameter": lengths} for width, lengths in WIDTHS.items()]
    described = {"name": name, "target": "tiny", "overrides": [*OVERRIDES, *overrides], "rungs": rungs}
    return Ladder.model_validate(described)
