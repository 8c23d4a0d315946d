"""Import of NxD Training configs, key by key."""

import json
from pathlib import Path

import pytest
import yaml

from flows.cli.main import main
from profiles import nxdt, resolve
from profiles.errors import ProfileError

# In the form of their configs, with the values of their run of Llama 3 70B on trn1.
CONFIG = """
name: hf_llama
model_source: hf
seed: 1234

trainer:
  devices: 32
  num_nodes: 16
  max_epochs: -1
  max_steps: 30000
  log_every_n_steps: 1
  val_check_interval: ${trainer.max_steps}
  limit_val_batches: 1
  gradient_clip_val: 1.0
  sequential_move_factor: 11

exp_manager:
  explicit_log_dir: null
  exp_dir: null
  name: ${name}
  create_tensorboard_logger: True
  resume_if_exists: True
  resume_from_checkpoint: null
  async_checkpointing: False
  checkpoint_callback_params:
    save_top_k: 1
    every_n_train_steps: 1000
    use_master_weights_in_ckpt: False

distributed_strategy:
  tensor_model_parallel_size: 32
  pipeline_model_parallel_size: 8
  virtual_pipeline_model_parallel_size: 1
  context_parallel_size: 1
  zero1: True
  sequence_parallel: True
  kv_replicator: 4

data:
  micro_batch_size: 1
  global_batch_size: 1024
  train_dir: /fsx/wikicorpus_tokenized
  val_dir: null
  seq_length: 8192
  tokenizer:
    type: /fsx/tokenizers/llama3

model:
  encoder_seq_length: 8192
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 80
  hidden_size: 8192
  ffn_hidden_size: 28672
  num_attention_heads: 64
  num_kv_heads: 8
  rope_theta: 500000
  vocab_size: 128256
  layernorm_epsilon: 1e-5
  qkv_linear: True
  fuse_qkv: True
  pipeline_cuts: null
  activations_checkpoint_granularity: selective
  activations_checkpoint_recompute: [CoreAttention, MLP]
  do_layer_norm_weight_decay: False
  fusions:
    softmax: True
    flash_attention: True
  optim:
    name: adamw_fp32OptState
    lr: 1.5e-5
    weight_decay: 0.1
    betas: [0.9, 0.95]
    sched:
      name: CosineAnnealing
      warmup_steps: 2000
      constant_steps: 0
      min_lr: 1.0e-6
      max_steps: ${multiply:${trainer.max_steps}, 1}

precision:
  type: mixed_precision
  fp32_grad_acc: True

compiler_flags: '--model-type transformer'
aync_exec_max_inflight_requests: 7
"""


def write(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "theirs.yaml"
    path.write_text(text)
    return path


def test_nxd_llama3_70b_imports_as_the_shipped_profile(tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    assert main(["import-config", str(write(tmp_path)), str(out)]) == 0
    mine, ours = resolve.load(str(out)), resolve.load("llama3-70b-trn1")
    assert mine.name == "hf_llama"
    assert mine.model == ours.model
    assert mine.train == ours.train
    assert mine.cluster == ours.cluster
    assert (mine.parallel.tensor, mine.parallel.pipeline, mine.kv_replication) == (32, 8, 4)
    assert (mine.checkpoint.every, mine.checkpoint.keep) == (1000, 1)
    assert mine.data.sources[0].path == "/fsx/wikicorpus_tokenized"
    assert "wrote " in capsys.readouterr().out


def test_every_key_is_reported(tmp_path, capsys):
    path = write(tmp_path)
    assert main(["import-config", str(path), str(tmp_path / "mine.yaml"), "--json"]) == 0
    told = {line["key"]: line for line in json.loads(capsys.readouterr().out)["keys"]}
    assert told.keys() == nxdt.read(path).keys()
    assert told["trainer.max_steps"]["ours"] == "train.steps"
    assert told["trainer.val_check_interval"]["value"] == 30000
    for key, line in told.items():
        assert line["ours"] or line["note"], key
    assert "KV heads" in told["distributed_strategy.kv_replicator"]["note"]
    assert "not supported by Trainshed" in told["trainer.max_epochs"]["note"]


def test_rules_set_only_keys_of_the_schema():
    """Rules name keys that profiles have, whatever the value."""
    sections = resolve.load("tiny").model_dump(mode="json")
    named = {"train.steps": 1, "parallel.tensor": 1}
    for key, rule in nxdt.RULES.items():
        for value in (
            1,
            True,
            None,
            "x",
            "selective",
            "adamw",
            "mixed_precision",
            "CosineAnnealing",
            [0.9, 0.95],
        ):
            try:
                named |= rule(value)[0]
            except (ProfileError, TypeError, ValueError):
                continue
        assert key
    for key in named.keys() - {"name", "", "model.config"}:
        section, name = key.split(".")
        assert name in sections[section], key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("CosineAnnealing", "Polynomial"), "model.optim.sched.name = Polynomial: has no equivalent"),
        (("mixed_precision", "fp16"), "precision.type = fp16: has no equivalent"),
        (("${trainer.max_steps}", "${trainer.steps}"), "refers to an undefined key"),
        (("max_steps: 30000", "max_steps: ${trainer.max_steps}"), "refers to itself"),
        (("  train_dir: /fsx/wikicorpus_tokenized\n", ""), "data.train_dir: is missing"),
        (("tensor_model_parallel_size: 32", "tensor_model_parallel_size: many"), "parallel.tensor = many"),
        (("name: hf_llama", "name: [hf"), "is not YAML"),
    ],
)
def test_untranslatable_config_is_rejected_and_nothing_is_written(tmp_path, capsys, change, message):
    assert change[0] in CONFIG
    out = tmp_path / "mine.yaml"
    assert main(["import-config", str(write(tmp_path, CONFIG.replace(*change, 1))), str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_existing_file_is_not_overwritten(tmp_path, capsys):
    out = tmp_path / "mine.yaml"
    out.write_text("mine")
    assert main(["import-config", str(write(tmp_path)), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_pipeline_cuts_convert_to_first_layers_of_stages(tmp_path):
    cuts = "[model.layers.18, model.layers.38, model.layers.58]"
    values, _ = nxdt.convert(
        nxdt.read(write(tmp_path, CONFIG.replace("pipeline_cuts: null", f"pipeline_cuts: {cuts}"))), tmp_path
    )
    assert values["parallel"]["pipeline_cuts"] == [19, 39, 59]


def test_model_config_path_is_imported(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = yaml.safe_load(CONFIG)
    theirs["model"] = {"model_config": "config.json", "encoder_seq_length": 64, "optim": {"lr": 1e-4}}
    theirs["distributed_strategy"] = {"tensor_model_parallel_size": 2}
    out = tmp_path / "mine.yaml"
    assert main(["import-config", str(write(tmp_path, yaml.safe_dump(theirs))), str(out)]) == 0
    assert resolve.load(str(out)).model.hidden_size == 64
