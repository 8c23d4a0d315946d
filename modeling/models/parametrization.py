"""Parametrization: initial weights and rates by width and depth, to transfer rates from small models.

With m = hidden_size and L = layers, both relative to the base model's, σ = initializer_range and η the learning rate:

    group                               standard     mup              completep
                                        std    rate  std       rate   std            rate
    embedding, norms                    σ, 1   η     σ, 1      η      σ, 1           η
    q, k, v, gate, up                   σ      η     σ/√m      η/m    σ/√m           η/m
    output, down (onto the residual)    σ      η     σ/√m      η/m    σ/(√m·L)       η/(m·L)
    head                                σ      η     σ/m       η/m    σ/m            η/m
    final norm of a tied model          1      η     1/m       η/m    1/m            η/m

mup is muP's Table 3 (Tensor Programs V, arXiv 2203.03466); completep is CompleteP with α = 1 (arXiv 2505.01618), whose residual
multiplier 1/L is folded into the weights that it multiplies: under Adam, multiplying a weight by c is equivalent to multiplying
its initial values and its rate by c. The output multiplier of a tied model is folded into the final norm. So no layer has a
multiplier, and exported models are ordinary ones. Weight decay per step, rate times decay, is that of the base model for every
group, as in CompleteP. Adam's ε is not scaled: it is small compared with the gradients of models of practical size.

Of matrices that Muon updates, the rates are η/√m and η/(√m·L) instead of η/m and η/(m·L): an update's spectral norm should
not depend on the width (arXiv 2310.17813), and that of Muon's, 0.2 √max(rows, columns), grows with √m only.

The head size stays constant as the width grows (the number of heads increases), so 1/√d is right at every width.
"""

from __future__ import annotations

import math

from parallel.initialization import Constant, Normal
from profiles.sections.model import Model


def embedding(model: Model) -> Normal:
    """Initializer of the token embedding."""
    return Normal(model.initializer_range)


def hidden(model: Model) -> Normal:
    """Initializer of matrices that read the residual stream."""
    m = model.width_factor
    return Normal(model.initializer_range / math.sqrt(m), 1 / m, m)


def residual(model: Model) -> Normal:
    """Initializer of matrices that write to the residual stream."""
    m, depth = model.width_factor, model.depth_factor
    return Normal(model.residual_initializer_range / (math.sqrt(m) * depth), 1 / (m * depth), m)


def head(model: Model) -> Normal:
    """Initializer of the output projection of an untied model."""
    return Normal(model.initializer_range / model.width_factor, 1 / model.width_factor)


def final_norm(model: Model) -> Constant:
    """Initializer of the norm before the head, which scales the logits of a tied model."""
    scale = 1 / model.width_factor if model.tie_word_embeddings else 1.0
    return Constant(scale, scale)
