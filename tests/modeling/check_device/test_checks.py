"""`modeling.check_device`: CPU checks pass, wrong kernels are found, missing Neuron software is named."""

import json
import os
import re
import socket
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.check_device import checks, isolation, kernel_errors, product_errors
from modeling.check_device.__main__ import main
from modeling.check_device.kernel_check import KernelCheck, errors_of
from modeling.compilation import compilers
from parallel import device
from parallel.attention import zigzag
from parallel.experts import grouped
from parallel.layers.products import Float8
from profiles import resolve
from profiles.files import exit_codes
from tests.ports import free_port
from tests.profiles.pair import PAIR

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def run_environment(monkeypatch):
    """The variables that launchers set for a run on a GPU, which deterministic cuBLAS needs."""
    for name, value in device.CUDA.environment:
        monkeypatch.setenv(name, value)


def test_checks_pass_on_a_cpu(monkeypatch):
    """Checks of one process without a profile; tests/emulation covers the others."""
    monkeypatch.setattr("modeling.planning.measure.ROUNDS", 1)
    results = [check("cpu") for check in (checks.check_matrix_products, checks.check_memory_bandwidth)]
    assert all(result.passed for result in results)
    assert "TFLOP/s" in results[0].measured


def test_kernels_are_checked_on_the_shapes_of_the_profile(monkeypatch):
    """On those of one of 2 ranks, with an uneven vocabulary, a sliding window, and document masks."""
    model = {"architecture": "mistral", "hidden_size": 48, "intermediate_size": 64, "vocab_size": 331}
    model |= {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    changes = {f"model.{key}": value for key, value in model.items()} | {"model.sliding_window": 20}
    changes |= {"parallel.tensor": 2, "cluster.devices_per_node": 2, "train.document_masks": "true"}
    changes |= {"train.sequence_length": 72, "parallel.data_sharding": "zero1", "train.precision": "bf16"}
    profile = resolve.load(PAIR, [f"{key}={value}" for key, value in changes.items()])
    seen = defaultdict(set)

    def recorded(name, function):
        def call(*inputs, **options):
            masks = options.get("documents") is not None, options.get("window")
            seen[name].add((tuple(tuple(x.shape) for x in inputs if isinstance(x, Tensor)), masks))
            return function(*inputs, **options)

        return call

    for name in ("attention", "linear_cross_entropy", "adamw"):
        monkeypatch.setattr(kernel_errors, name, recorded(name, getattr(kernel_errors, name)))
    assert checks.check_kernels("cpu", profile).passed
    assert seen["attention"] == {(((1, 3, 72, 8), (1, 1, 72, 8), (1, 1, 72, 8)), (True, 20))}
    assert seen["linear_cross_entropy"] == {
        (((288, 48), (166, 48), (288,)), (False, None))
    }  # 4 samples, one chunk
    h, f, d = 48, 64, 8
    vocabulary = 8000  # 166 x 48, aligned to 128 bytes
    matrices = 2 * vocabulary + (3 + 2 * 1) * d * h + h * 3 * d + 3 * h * f // 2  # of one rank, in one shard
    assert seen["adamw"] == {(((matrices,),) * 4, (False, None))}


EXPERTS = ("tiny-moe", ())
SLOTS = ("tiny-moe", ("train.capacity_factor=1.25",))
FP8 = (PAIR, ("train.precision=fp8", "model.head_dim=32"))
MX = (FP8[0], (*FP8[1], "train.fp8_recipe=mxfp8"))
GPT_OSS = ("model.architecture=gpt_oss", "model.moe_intermediate_size=null")  # with biases
BIASED = ("tiny-moe", GPT_OSS)
ADAPTED = ("tiny-moe", (*GPT_OSS, "lora.rank=4", "lora.targets=[gate_up,down]"))


def kernel(name: str, case: tuple[str, tuple[str, ...]]) -> kernel_errors.KernelCheck:
    """A profile's kernel whose name begins with `name`."""
    profile = resolve.load(case[0], list(case[1]))
    return next(each for each in kernel_errors.kernels_of(profile) if each.name.startswith(name))


CPU_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


@CPU_AND_GPU
@pytest.mark.parametrize("case", [EXPERTS, SLOTS, ADAPTED])
def test_experts_are_checked_where_a_profile_has_them(case, device):
    measured, passed = kernel("experts", case).check(torch.device(device))
    assert passed, measured


@pytest.mark.parametrize("case", [EXPERTS, BIASED])
def test_grouped_products_of_experts_are_checked(case, monkeypatch):
    """As on Blackwell, whose kernel leaves gradients of experts without rows unwritten; CPUs compute them."""

    def unwritten(a, b, *, offs):
        result = F.grouped_mm(a, b, offs=offs)
        if result.dim() == 3:  # gradients of weights
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return result

    monkeypatch.setattr(grouped, "has_kernel", lambda parameters: True)
    monkeypatch.setattr(grouped, "F", SimpleNamespace(grouped_mm=unwritten))
    measured, passed = kernel("experts", case).check(torch.device("cpu"))
    assert passed, measured


def check_of_a_kernel_that_writes_a_part():
    def partly(x):
        result = torch.empty(4096, 1024, dtype=x.dtype, device=x.device)
        result[: len(x)] = x
        return [result]

    inputs = [torch.ones(4000, 1024)]
    expected = [torch.ones(4096, 1024)]
    device.CPU.set_current()  # memory that is freed stays in the process
    check = KernelCheck("partly", "1", lambda local: errors_of(partly, inputs, local, expected))
    return check.check(torch.device("cpu"))


def test_elements_that_a_kernel_leaves_unwritten_fail_its_check(pool):
    ((measured, passed),) = pool.run(check_of_a_kernel_that_writes_a_part, ranks=1)
    assert measured.startswith("partly of 1: float32 nan, bf16 nan")
    assert not passed


@CPU_AND_GPU
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_products_are_checked_where_a_profile_has_them(recipe, device):
    case = FP8[0], (*FP8[1], f"train.fp8_recipe={recipe}")
    measured, passed = kernel("FP8 512 × 192", case).check(torch.device(device))
    assert passed, measured


MASKED = ("train.document_masks=true", "model.architecture=mistral", "model.sliding_window=96")
RING = ("parallel.tensor=1", "parallel.context=2")


@pytest.mark.cuda
@pytest.mark.parametrize("settings", [(), MASKED, RING])
def test_kernels_pass_on_a_gpu(settings):
    """At the head size of real models; document masks and windows use a separate kernel."""
    result = checks.check_kernels("cuda", resolve.load(PAIR, ["model.head_dim=128", *settings]))
    assert result.passed, result.measured


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (RING, ["ring attention"]),
        ((*RING, "train.document_masks=true"), ["attention"]),
        ((*RING, *MASKED[1:]), ["attention, window 96"]),
        ((*RING, "cluster.device=neuron"), ["context attention"]),
    ],
)
def test_blocks_of_ring_attention_are_checked_where_a_profile_uses_them(settings, names):
    found = kernel_errors.kernels_of(resolve.load(PAIR, list(settings)))
    assert [each.name for each in found] == [*names, "loss", "update", "norm", "products"]
    measured, passed = found[0].check(torch.device("cpu"))
    assert passed, measured


def test_wrong_merge_of_a_ring_is_found(monkeypatch):
    monkeypatch.setattr(zigzag, "merge", lambda *_: None)
    measured, passed = kernel("ring attention", (PAIR, RING)).check(torch.device("cpu"))
    assert not passed
    assert measured.startswith(
        "ring attention of 8 query and 2 KV heads of 24, 128 tokens of each of 2 ranks: "
    )


@pytest.mark.parametrize("enabled", [pytest.param(True, marks=pytest.mark.compiles), False])
def test_loss_is_compiled_as_in_training(monkeypatch, enabled):
    """On accelerators, here the CPU in their place; the compiler runs the graph as it is."""
    compiled = []

    def compile_graph(_, graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(kernel_errors, "EAGER", ())
    monkeypatch.setattr(compilers.Inductor, "compile", compile_graph)
    case = PAIR, (f"compile.enabled={str(enabled).lower()}",)
    for name in ("loss", "update"):
        measured, passed = kernel(name, case).check(torch.device("cpu"))
        assert passed, measured
    assert len(compiled) == 2 * enabled  # the loss in two precisions; torch has a fused kernel of the update


def test_profile_without_experts_and_fp8_checks_neither():
    assert [each.name for each in kernel_errors.kernels_of(resolve.load(PAIR))] == [
        "attention",
        "loss",
        "update",
        "norm",
        "products",
    ]


SINKS = ("model.sliding_window=96", "model.full_attention_every=2", *GPT_OSS)
LATENT = (
    *("model.architecture=deepseek_v3", "model.num_key_value_heads=4", "model.kv_lora_rank=32"),
    *("model.qk_nope_head_dim=16", "model.qk_rope_head_dim=8", "model.v_head_dim=12", "model.head_dim=null"),
    *("model.n_shared_experts=1", "model.first_k_dense_replace=1"),
)


@pytest.mark.parametrize(
    ("settings", "names"),
    [(SINKS, ["attention, window 96", "attention"]), (LATENT, ["attention"])],
    ids=["gpt_oss", "deepseek_v3"],
)
def test_attention_of_each_kind_of_layer_is_checked(settings, names, monkeypatch):
    """With sinks and each window, or with values narrower than keys; finds wrong norms and products."""
    seen, call = [], kernel_errors.attention

    def recorded(q, k, v, *given, **options):
        seen.append((v.shape[-1] < k.shape[-1], options["sinks"] is not None, options["window"]))
        return call(q, k, v, *given, **options)

    monkeypatch.setattr(kernel_errors, "attention", recorded)
    found = kernel_errors.kernels_of(resolve.load("tiny-moe", list(settings)))
    checked = [each for each in found if each.name.startswith("attention")]
    assert [each.name for each in checked] == names
    for each in [*checked, *(each for each in found if each.name in ("norm", "products"))]:
        measured, passed = each.check(torch.device("cpu"))
        assert passed, measured
    latent = settings is LATENT
    windows = [None if name == "attention" else 96 for name in names]
    assert list(dict.fromkeys(seen)) == [(latent, not latent, window) for window in windows]


def test_loss_is_checked_on_a_chunk_of_training():
    """The chunk of a GPU is larger than what a CPU computes; the formula then runs in tiles."""
    found = kernel_errors.kernels_of(resolve.load("llama3-8b-h100"))
    assert next(each.shape for each in found if each.name == "loss") == "2048 × 4096 by 128256 tokens"
    profile = resolve.load(PAIR, ["train.sequence_length=512", "model.max_position_embeddings=512"])
    assert max(kernel_errors.loss_errors(profile, torch.device("cpu")).values()) < 2e-2


def test_wrong_norm_is_found(monkeypatch):
    monkeypatch.setattr(product_errors.RMSNorm, "forward", lambda self, x: x * self.weight)
    measured, passed = kernel("norm", (PAIR, ())).check(torch.device("cpu"))
    assert not passed, measured


def next_expert(call):
    """Experts that return another expert's outputs."""
    return lambda *inputs, **options: call(*inputs[:-2], inputs[-2].roll(1, 0), inputs[-1], **options)


def nan_gradients(call):
    """Experts with correct outputs but NaN gradients."""

    def wrong(*inputs, **options):
        y = call(*inputs, **options)
        y.register_hook(lambda grad: torch.full_like(grad, torch.nan))
        return y

    return wrong


@pytest.mark.parametrize("wrong", [next_expert, nan_gradients])
@pytest.mark.parametrize(("operator", "case"), [("routed_experts", EXPERTS), ("slotted_experts", SLOTS)])
def test_wrong_experts_are_named_with_shape_deviation_and_remedy(monkeypatch, operator, case, wrong):
    monkeypatch.setattr(kernel_errors, operator, wrong(getattr(kernel_errors, operator)))
    measured, passed = kernel("experts", case).check(torch.device("cpu"))
    assert not passed
    shape = r"experts of 8 experts of 128 × 96, \d+ rows, of the last expert none: float32 \S+, bf16 \S+"
    assert re.match(shape + ", float32 above 1e-05, bf16 above 2e-02; ", measured)
    assert ("set train.capacity_factor" in measured) == (case is EXPERTS)


def other_scales(quantized):
    values, scale = quantized
    return values, scale.roll(1, 0)


def larger(quantized):
    """Within the tolerance compared with float32; only the emulation detects it."""
    values, scale = quantized
    return values, scale * 1.02


@pytest.mark.parametrize(("wrong", "case"), [(other_scales, FP8), (other_scales, MX), (larger, FP8)])
def test_wrong_fp8_products_are_named_with_shape_deviation_and_remedy(monkeypatch, wrong, case):
    emulated = Float8(resolve.load(*case).train.fp8_recipe, emulated=True)

    class Wrong(Float8):
        def left(self, *inputs, **options):
            return wrong(super().left(*inputs, **options))

        def right(self, *inputs, **options):
            return wrong(super().right(*inputs, **options))

    monkeypatch.setattr(product_errors, "build_products", lambda *_: Wrong(emulated.recipe, emulated=True))
    measured, passed = kernel("FP8 512 × 192", case).check(torch.device("cpu"))
    assert not passed
    assert measured.startswith("FP8 512 × 192 of 256 × 192 by 192 × 512, fp8_recipe ")
    assert "emulated above 2e-02; set train.precision=bf16" in measured


def test_missing_kernel_is_named_with_shape_and_remedy(monkeypatch):
    def missing(*_, **__):
        raise NotImplementedError("no grouped products on this device")

    monkeypatch.setattr(kernel_errors, "routed_experts", missing)
    profile = resolve.load(*EXPERTS)
    result = checks.check_kernels("cpu", profile)
    assert not result.passed
    assert "experts of 8 experts of 128 × 96" in result.measured
    assert "no grouped products on this device; set train.capacity_factor" in result.measured
    assert "attention: float32" in result.measured  # other kernels are checked nevertheless


def test_sample_in_the_documentation_has_the_checks_of_the_code():
    page = (Path(__file__).parents[3] / "docs/devices/trainium.md").read_text()
    sample = next(block for block in page.split("```")[1::2] if block.startswith("\n✓"))
    rows = [re.split(r"\s{2,}", line) for line in sample.splitlines() if line.startswith("✓")]
    assert [(row[1], row[3]) for row in rows] == [(check.name, check.expected) for check in checks.CHECKS]
    words = re.findall("[a-z]+", sample.partition(rows[-1][1])[2])
    assert [word for word in words if word in checks.WAYS] == list(checks.WAYS)


def test_machine_without_accelerator_is_rejected_by_name(monkeypatch, capsys):
    monkeypatch.setattr(device, "detect", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "init", fail("Found no NVIDIA driver on your system."))
    for arguments in ([], ["--calibrate"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        error = capsys.readouterr().err
        assert "cuda: Found no NVIDIA driver on your system.; neuron: torch-neuronx is not installed" in error
        assert "to check the CPU: --device cpu" in error


def fail(message):
    def call(*_, **__):
        raise RuntimeError(message)

    return call


def test_device_that_the_machine_lacks_is_rejected_by_name(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", fail("The NVIDIA driver on your system is too old\nmore"))
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cuda"])
    error = capsys.readouterr().err
    assert "this machine has no cuda device: The NVIDIA driver on your system is too old; to check" in error


@pytest.mark.parametrize(("own", "expected"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_checks_run_with_the_environment_of_a_run(monkeypatch, own, expected):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if own:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", own)
    started = []

    def start(*_, env, **__):
        started.append(env)
        raise FileNotFoundError

    monkeypatch.setattr(isolation.subprocess, "Popen", start)
    with pytest.raises(FileNotFoundError):
        isolation.run_checks("cuda", processes=1)
    assert started[0]["CUBLAS_WORKSPACE_CONFIG"] == expected
    assert started[0]["PATH"] == os.environ["PATH"]


def test_checks_on_trainium_have_their_own_address_for_collectives_or_the_users(monkeypatch):
    def address() -> str:
        return isolation.environment("neuron")["NEURON_RT_ROOT_COMM_ID"]

    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = free_port()
        monkeypatch.setattr(device, "LOCAL_PORTS", (other.getsockname()[1], free))
        assert address() == f"127.0.0.1:{free}"
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.0.0.1:41000")
    assert address() == "10.0.0.1:41000"


def test_nan_losses_differ():
    assert not checks._error([2.0, float("nan")], [2.0, 2.0]) <= 1


def test_kernel_checks_run_on_each_profile_given_on_the_command_line(tmp_path, monkeypatch, capsys):
    given = []
    (kernels,) = [check for check in checks.CHECKS if check.takes_profile]
    kernels = replace(kernels, run=lambda *subjects: given.append(subjects) or checks.Result(""))
    monkeypatch.setattr(checks, "CHECKS", (kernels,))
    monkeypatch.setattr(exit_codes, "leave", lambda code: sys.exit(code))
    monkeypatch.setattr(isolation, "_run_isolated", run_here)
    fp8 = tmp_path / "tiny-fp8.yaml"
    fp8.write_text("extends: tiny\ntrain: {precision: fp8}\n")
    assert main(["--device", "cpu", "--profile", "llama3-8b-h100", str(fp8), "--json"]) == 0
    assert given == [("cpu", resolve.load("llama3-8b-h100")), ("cpu", resolve.load(str(fp8)))]
    rows = json.loads(capsys.readouterr().out.split("\n", 2)[2])["checks"]
    assert [(row["check"], row["expected"]) for row in rows] == [
        ("kernels, llama3-8b-h100", "within 1e-5, bf16 2e-2"),
        ("kernels, tiny-fp8", "within 1e-5, bf16 2e-2, FP8 8e-02"),
    ]


def run_here(check, kind, processes, profile):
    """Run a check as its process would."""
    with pytest.raises(SystemExit, match="0"):
        main(["--device", kind, "--check", check.name, "--profile", profile])
    return checks.Result("")


def test_unknown_profile_is_rejected_before_the_checks(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", "--profile", "tinny"])
    assert "nearest valid: tiny" in capsys.readouterr().err


def test_checks_run_on_all_devices_in_separate_processes(tmp_path, monkeypatch, capsys):
    """The document has all results, including failed ones. Modules of the working folder are not imported."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/__init__.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    broken = replace(checks.CHECKS[0], name="missing")  # unknown to its process
    collective = next(check for check in checks.CHECKS if check.name == "collectives")
    monkeypatch.setattr(checks, "CHECKS", (broken, collective))
    assert main(["--device", "cpu", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["processes"] == 2
    missing, collectives = document["checks"]
    assert (missing["check"], missing["passed"]) == ("missing", False)
    assert "missing is not a valid value" in missing["measured"]
    assert collectives["passed"], collectives["measured"]
    assert "all-gather" in collectives["measured"]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "not installed"),
        ("1.0", "placeholder"),
        ("2.9.0.2.15", f"not built for torch {torch.__version__.partition('+')[0]}"),
    ],
)
def test_neuron_without_its_software_is_rejected_by_name(tmp_path, monkeypatch, capsys, version, message):
    if version:
        install_torch_neuronx(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "neuron"])
    error = capsys.readouterr().err
    assert message in error
    assert "AWS's package index" in error


@pytest.mark.parametrize("real", [False, True])
def test_neurons_package_is_imported_unless_it_is_a_placeholder(tmp_path, monkeypatch, real):
    """Torch itself does so only if the user allows it."""
    version = ".".join((*torch.__version__.split(".")[:2], "3")) if real else "1.0"
    install_torch_neuronx(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        device.for_traces("neuron")
    assert (sys.modules.pop("torch_neuronx", None) is not None) is real
    (tmp_path / "torch_neuronx.py").write_text("raise ImportError('no libnrt.so')")
    lacks = compilers.Neuron("neuron").missing_software()
    unusable = f"no working TorchNeuron (torch-neuronx {version} cannot be imported: no libnrt.so; repair or remove it)"
    assert lacks == (unusable if real else "no TorchNeuron (torch-neuronx from AWS's index)")


def install_torch_neuronx(folder: Path, version: str) -> None:
    """Put an empty package of this version into a folder of modules."""
    metadata = folder / f"torch_neuronx-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-neuronx\nVersion: {version}\n")
    (folder / "torch_neuronx.py").touch()
