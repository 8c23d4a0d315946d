"""Tokenization of a dataset plan's shards, in this process, a pool of processes or a Slurm array.

Start with `dataset_plan` (what is tokenized, and its cache keys) and `tokenize_shard` (one shard to an artifact). `engines` and
`word_cache` turn text into ids, `worker_pool` runs many shards through `worker`, here or on Slurm. `tokenizer_fetch`,
`tokenizer_files` and `tokenizer_training` make the tokenizer's own artifact. For fine-tuning, `examples` decides which tokens of
a record the loss covers, from its messages (`conversations`) and from where the template puts their answers (`chat_templates`).
Imports `modeling`, `profiles`, `tasks`, `tasks.launchers`, `tasks.sources` and `tasks.store`.
"""
