"""Build a profile's mesh and pipeline stages."""

from __future__ import annotations

import torch

from modeling.models.gpt import GPT
from modeling.models.llama import Llama
from parallel import Mesh
from parallel import device as devices
from parallel.activation_checkpointing import recompute
from profiles.schema import Profile

MODELS = {"llama": Llama, "gpt": GPT}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def mesh_of(profile: Profile) -> Mesh:
    """The run's mesh, as this process sees it."""
    parallel = profile.parallel
    return Mesh(
        parallel.pipeline,
        profile.data_parallel,
        parallel.context,
        parallel.tensor,
        profile.kv_replication,
        reduces=devices.resolve(profile.cluster.device).reduces,
    )


def build_stage(profile: Profile, mesh: Mesh, layers: range, device: torch.device) -> Llama | GPT:
    """The stage that holds these layers, its recomputation set, its weights as memory was."""
    model = MODELS[profile.model.architecture](
        profile.model,
        mesh,
        layers,
        sequence_parallel=profile.parallel.sequence_parallel,
        dtype=DTYPES[profile.train.precision],
        device=device,
    )
    recompute(model.layers.values(), profile.train.recompute, profile.train.recompute_layers)
    return model
