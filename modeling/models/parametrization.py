"""Parametrization: how initial weights and learning rates depend on width and depth, to transfer rates from small models.

With m = hidden_size and L = layers, both relative to the base model's, σ = initializer_range and η the learning rate:

    group                               standard     mup              completep
                                        std    rate  std       rate   std            rate
    embedding, norms                    σ, 1   η     σ, 1      η      σ, 1           η
    q, k, v, gate, up                   σ      η     σ/√m      η/m    σ/√m           η/m
    output, down (onto the residual)    σ      η     σ/√m      η/m    σ/(√m·L)       η/(m·L)
    head                                σ      η     σ/m       η/m    σ/m            η/m
    final norm of a tied model          1      η     1/m       η/m    1/m            η/m

mup is muP's Table 3 (Tensor Programs V, arXiv 2203.03466); completep is CompleteP with α = 1 (arXiv 2505.01618), whose residual
multiplier 1/L is folded into the weights that it multiplies: under Adam, a multiplier c of a weight equals c times its initial
values and c times its rate. The output multiplier of a tied model is folded into the final norm. So no layer has a multiplier,
and an exported model is an ordinary one. Weight decay per step, rate times decay, is that of the base model for every group, as
in CompleteP. Adam's ε is not scaled: it is small compared with the gradients of models of practical size.

Heads keep their size when the width grows (there are more of them), for which 1/√d is right at every width.
"""

from __future__ import annotations

import math

from parallel.initialization import Constant, Normal
from profiles.sections.model import Model


def embedding(model: Model) -> Normal:
    """Of the token embedding."""
    return Normal(model.initializer_range)


def hidden(model: Model) -> Normal:
    """Of matrices from the residual stream into a layer."""
    m = model.width_factor
    return Normal(model.initializer_range / math.sqrt(m), 1 / m)


def residual(model: Model) -> Normal:
    """Of matrices from a layer onto the residual stream."""
    m, depth = model.width_factor, model.depth_factor
    return Normal(model.residual_initializer_range / (math.sqrt(m) * depth), 1 / (m * depth))


def head(model: Model) -> Normal:
    """Of the output projection of a model that is not tied."""
    return Normal(model.initializer_range / model.width_factor, 1 / model.width_factor)


def final_norm(model: Model) -> Constant:
    """Of the weight of the norm before the head, which scales the logits of a tied model."""
    scale = 1 / model.width_factor if model.tie_word_embeddings else 1.0
    return Constant(scale, scale)
