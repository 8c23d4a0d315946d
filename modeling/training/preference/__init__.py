"""Training on preference pairs: DPO and ORPO.

Start with `loss.py`, the losses. The log-probabilities of DPO's reference model come from `modeling/training/reference.py`, a
program that computes them once before training, or from `reference_model.py`, a frozen copy beside the trained model. Imports
`modeling.data`, `modeling.models`, `parallel` and `profiles`.
"""
