"""The section `train`: hyperparameters of training."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from profiles import recompute
from profiles.errors import ProfileError
from profiles.recompute import Recompute
from profiles.sections import roles
from profiles.sections.base import FUNCTION, Count, Fraction, Natural, Rate, Section, Size, required


class Train(Section):
    """Training hyperparameters."""

    default_role = roles.MATHEMATICS

    steps: Annotated[Count | None, roles.SCHEDULE] = None
    """optimizer steps; null if train.epochs is set"""
    epochs: Annotated[Count | None, roles.SCHEDULE] = None
    """passes over the data, which determine the steps; null if train.steps is set"""
    global_batch_size: Annotated[Count, roles.EXPERTS]
    """samples per optimizer step over all ranks"""
    micro_batch_size: Annotated[Size, roles.GRAPHS] = 1
    """samples per forward pass on a rank"""
    sequence_length: Annotated[Size, roles.LENGTH]
    """tokens per sample"""
    learning_rate: Annotated[Rate, roles.SCHEDULE]
    """peak learning rate"""
    minimum_learning_rate: Annotated[Rate, roles.SCHEDULE] = 0.0
    """learning rate at the end of the decay; no effect with schedule constant"""
    warmup_steps: Annotated[Natural, roles.SCHEDULE] = 0
    """linear warm-up steps"""
    constant_steps: Annotated[Natural, roles.SCHEDULE] = 0
    """steps at the peak after warm-up"""
    minimum_rate_steps: Annotated[Natural, roles.SCHEDULE] = 0
    """final steps at the minimum learning rate, after the decay (NeMo's constant_steps)"""
    schedule: Annotated[Literal["cosine", "linear", "constant"], roles.SCHEDULE] = "cosine"
    """shape of the decay"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """update rule of the matrices of blocks. muon: momentum, orthogonalized as a matrix, at AdamW's learning rate and weight
    decay; AdamW updates the rest: embeddings, head, norms, biases, routers, LoRA's factors"""
    muon_momentum: Fraction = 0.95
    """muon: momentum, in Nesterov's form"""
    muon_coefficients: Literal["published", "polar_express"] = "published"
    """muon: polynomials of the five Newton-Schulz steps: that of Jordan and Moonlight, or those of Polar Express"""
    muon_dtype: Literal["float32", "bf16"] | None = None
    """muon: dtype of the Newton-Schulz steps; null: float32 with train.precision float32, else bf16"""
    muon_heads: bool = False
    """muon: orthogonalize the rows of each head of Q, K and V, and of attention's output gate, by themselves (Muon Split of
    GLM-5), instead of all heads together; projections of linear attention are not cut"""
    qk_clip: Annotated[Annotated[float, Field(gt=0)] | None, roles.COMPILED_MATHEMATICS] = None
    """QK-clip: after each step, scale down queries and keys of heads whose largest attention logit in it exceeds this; Kimi K2
    used 100. null: none"""
    weight_decay: Rate = 0.1
    """decoupled weight decay"""
    norm_weight_decay: bool = False
    """apply weight decay to norm weights and biases too"""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """betas of AdamW"""
    epsilon: float = Field(default=1e-8, gt=0)
    """epsilon of AdamW"""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """gradient norm to clip to; null: no clipping"""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), roles.SAMPLES] = 1234
    """seed of initial weights, data order and dropout"""
    precision: Annotated[Literal["float32", "bf16", "fp8"], roles.PRECISION] = "bf16"
    """dtype of weights and activations; master weights are float32. fp8: bf16, with the layers' matrix products in 8 bits"""
    fp8_recipe: Annotated[Literal["tensorwise", "rowwise", "mxfp8"], roles.PRECISION] = "rowwise"
    """fp8: one scale per tensor, per row, or per 32 values of a row (mxfp8); tensorwise and rowwise need h100 or later, mxfp8
    b200, or trn3 for planning"""
    gradient_dtype: Annotated[Literal["float32", "bf16"], roles.COMPILED_MATHEMATICS] = "float32"
    """dtype of gradient accumulation"""
    recompute: Annotated[Recompute, roles.GRAPHS] = "none"
    """activation checkpointing: none, selective or full, for all layers; full 3 + selective 2: for the first layers of each
    pipeline stage; a list: one entry per stage; auto: for each layer, the cheapest that fits the device"""
    document_masks: Annotated[bool, roles.COMPILED_MATHEMATICS] = False
    """mask attention across documents and restart positions at each document"""
    balance: Annotated[Literal["sequence", "global", "batch", "bias", "none"], roles.EXPERTS] = "sequence"
    """experts: tokens that the balance loss is computed over. sequence: a sample; global: a step, counted in an additional
    forward pass; batch: a rank's microbatch, as in Hugging Face, so it depends on its size and the topology. bias: no loss;
    each step adjusts a bias in the selection of each expert against its excess load (deepseek_v3, glm4_moe)"""
    balance_coefficient: Annotated[Rate | None, roles.EXPERTS] = None
    """experts: coefficient of the balance loss; with balance bias, of an additional loss over each sample. null: 0.001, or 0
    with balance bias"""
    balance_bias_rate: Annotated[Annotated[float, Field(gt=0)] | None, roles.EXPERTS] = None
    """experts: update rate of the selection biases with balance bias; null: 0.001"""
    router_z_coefficient: Annotated[Rate, roles.EXPERTS] = 0.0
    """experts: coefficient of the router's z-loss"""
    capacity_factor: Annotated[Annotated[float, Field(gt=0)] | None, roles.CAPACITY] = None
    """experts: maximum tokens of a sample per expert, relative to an equal share; the rest are dropped. null: no limit"""
    deterministic: Annotated[bool, roles.KERNELS] = True
    """cuda: only deterministic kernels, to resume bit-identically; false: the fastest. cpu and neuron are always
    deterministic"""
    loss: Annotated[str | None, roles.COMPILED_MATHEMATICS] = Field(default=None, pattern=FUNCTION)
    """user loss, module:function: (logits (tokens, vocabulary) float32, targets (tokens), where -100 is ignored) -> sum over
    tokens, a 0-dim tensor; null: cross-entropy"""
    mtp_weight: Annotated[Rate, roles.MULTI_TOKEN] = 0.3
    """weight of the mean loss of the model.num_nextn_predict_layers modules for multi-token prediction, which is added to the
    loss; metrics.jsonl has their losses as mtp_loss_by_depth"""
    mtp_steps: Annotated[Count | None, roles.MULTI_TOKEN] = None
    """steps after which the weight is train.mtp_later_weight; null: all have the same"""
    mtp_later_weight: Annotated[Rate | None, roles.MULTI_TOKEN] = None
    """weight after train.mtp_steps; null: 0"""
    check_replicas_every: Annotated[Natural, roles.SAFEGUARDS] = 100
    """steps between checks that replicas of a weight are equal on all ranks; differences are logged and repaired. 0: only
    before a checkpoint is saved"""
    log_every: Annotated[Count, roles.SAFEGUARDS] = 1
    """steps between log lines; metrics.jsonl has every step"""
    spike_factor: Annotated[Annotated[float, Field(gt=1)] | None, roles.SAFEGUARDS] = None
    """skip a step whose loss exceeds this multiple of the recent median; null: no limit. A step whose loss or gradient norm is
    not finite is always skipped"""
    bad_steps: Annotated[Count, roles.SAFEGUARDS] = 10
    """consecutive skipped steps after which the run rolls back to a checkpoint and excludes their samples"""
    rollbacks: Annotated[Natural, roles.SAFEGUARDS] = 2
    """rollbacks before the run stops"""

    @model_validator(mode="after")
    def _check_recompute(self) -> Self:
        if reason := recompute.invalid(self.recompute):
            raise ProfileError("recompute", self.recompute, reason, [*recompute.MODES, recompute.AUTO])
        return self

    @property
    def last_step(self) -> int:
        """`steps`, which also a run with `epochs` has once its dataset exists."""
        return required(self.steps)

    @property
    def newton_schulz_dtype(self) -> Literal["float32", "bf16"]:
        """Dtype in which Muon orthogonalizes matrices."""
        return self.muon_dtype or ("float32" if self.precision == "float32" else "bf16")

    @property
    def expert_loss_coefficient(self) -> float:
        """Coefficient of the balance loss."""
        default = 0.0 if self.balance == "bias" else 0.001
        return default if self.balance_coefficient is None else self.balance_coefficient

    @property
    def expert_bias_step(self) -> float:
        """How much a step moves an expert's selection bias."""
        if self.balance != "bias":
            return 0.0
        return 0.001 if self.balance_bias_rate is None else self.balance_bias_rate
