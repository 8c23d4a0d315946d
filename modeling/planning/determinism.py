"""Cost of `train.deterministic` on GPUs: measured if both tables exist, else estimated.

torch's deterministic mode excludes cuDNN's attention, so that runs use FlashAttention-2, whose deterministic backward adds in a
fixed order. The estimate plans the run with one kernel's published speed and with the other's (efficiency.py).
"""

from __future__ import annotations

from modeling.models.build import device_of
from modeling.planning import calibration
from modeling.planning.planner import Plan, plan
from profiles.check import with_value
from profiles.schema import Profile

SOURCE = "published speeds of FlashAttention-2 and cuDNN on a Hopper GPU, flash-attention pull request 1893"


def describe_cost(profile: Profile, planned: Plan) -> str | None:
    """Cost of deterministic kernels as text; None if the setting has no effect or times are unknown."""
    device = device_of(profile)
    if not device.nondeterministic or planned.step_seconds is None:
        return None
    if not profile.train.deterministic:
        return "off: the fastest kernels; a resumed run is not bit-identical"
    measured = [
        calibration.find(with_value(profile, "train.deterministic", setting)) for setting in (True, False)
    ]
    # Documents and soft caps take FlexAttention with either setting.
    flash = not (profile.document_masks or profile.model.attn_logit_softcapping)
    published = device.architecture == "hopper" and flash and not any(measured)
    if not (all(measured) or published):
        return "on, the default: its cost is neither measured nor estimated for this run"
    fastest = plan(with_value(profile, "train.deterministic", False)).step_seconds
    slower = planned.step_seconds / fastest - 1 if fastest else 0.0
    if all(measured):
        return f"on, the default: a step is {slower:.0%} longer than with the fastest kernels, by both measured tables"
    return f"on, the default: not measured; attention's kernels make a step about {slower:.0%} longer (estimate: {SOURCE})"
