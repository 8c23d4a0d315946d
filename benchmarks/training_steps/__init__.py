"""Training steps of Trainshed and of other libraries on one workload, one program per implementation.

Start with `ours`, and `hugging_face` as a peer in a plain training loop. `llama` is the torch model of peers that have none, and
`bound` the lower bound of a step's time. Programs share the options and the loop of `benchmarks.harness.workload`, and are run by
`benchmarks.rows.comparisons`. May import `harness`.
"""
