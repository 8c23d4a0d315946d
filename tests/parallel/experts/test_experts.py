"""Mixture of experts: products, capacity, balance losses and the selection bias."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from modeling.data.prefetch import Batch
from modeling.training.trainer import Trainer
from parallel import Axis, Mesh, ShardedAdamW, collectives, initialize
from parallel.activation_checkpointing import apply_activation_checkpointing
from parallel.device import Download
from parallel.experts import dropless, exchange, grouped, lora
from parallel.experts import layer as layers
from parallel.experts.activations import ACTIVATIONS
from parallel.experts.balance import EXTRA, Balance, losses, record
from parallel.experts.dropless import routed_experts
from parallel.experts.exchange import Exchange
from parallel.experts.layer import ExpertOptions, MixtureOfExperts, counting_choices
from parallel.experts.router import Routing
from parallel.experts.slots import assign_slots, slotted_experts
from parallel.layers.lora import without_updates
from tests.parity.harness import Case, batch
from tests.pool import mesh

T, H, F, E, K = 12, 8, 8, 5, 2
ALONE = Axis("expert")


def inputs(t: int = T, h: int = H, f: int = F) -> dict[str, torch.Tensor]:
    """Tokens, weights, and parameters of experts with biases; the last expert gets no token."""
    torch.manual_seed(0)
    shapes = {"x": (t, h), "weights": (t, K), "gate_up": (E, 2 * f, h), "down": (E, h, f)}
    shapes |= {"gate_up_bias": (E, 2 * f), "down_bias": (E, h)}
    return {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}


def updates() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Factors of low-rank updates of rank 4."""
    shapes = {"gate_up_update": ((E, 4, H), (E, 2 * F, 4)), "down_update": ((E, 4, F), (E, H, 4))}
    return {
        name: tuple(torch.randn(shape, requires_grad=True) for shape in pair) for name, pair in shapes.items()
    }


def choices(t: int = T) -> torch.Tensor:
    return torch.stack([torch.randperm(E - 1)[:K] for _ in range(t)])


def one_by_one(given: dict[str, torch.Tensor], indices: torch.Tensor, activation: str) -> torch.Tensor:
    """Reference: the sum over each token's experts, with the experts' weights gathered for every token."""
    total = torch.zeros_like(given["x"])
    for choice in range(K):
        expert = indices[:, choice]
        hidden = (
            torch.einsum("tfh,th->tf", given["gate_up"][expert], given["x"]) + given["gate_up_bias"][expert]
        )
        out = torch.einsum("thf,tf->th", given["down"][expert], ACTIVATIONS[activation].forward(hidden))
        total = total + given["weights"][:, choice, None] * (out + given["down_bias"][expert])
    return total


class Shared(torch.autograd.Function):
    """Stands for shared experts; notes when they are computed, forward and backward."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("shared")
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append("shared")
        return 2 * grad, None


class BesideShared(torch.nn.Module):
    def __init__(self, experts: MixtureOfExperts, events: list[str]) -> None:
        super().__init__()
        self.experts, self.events = experts, events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.experts.start(x, T)
        shared = 2 * x if torch.compiler.is_compiling() else Shared.apply(x, self.events)
        return shared + experts()


def passes_of_experts(
    mode: str, compiled: bool, counts: bool
) -> tuple[list[str], list[str], list[torch.Tensor]]:
    """Events of forward and of backward on two ranks, with grouped products as on GPUs; results.

    `counts`: after a pass that counts the choices of two microbatches, of which the second one trains.
    """
    events: list[str] = []
    sent, repeat, product = (
        collectives.start_uneven_all_to_all,
        torch.Tensor.repeat_interleave,
        torch.nn.functional.grouped_mm,
    )
    waited, returned = Download.wait, Exchange.receive_back

    def noting(event, function):
        return lambda *given, **named: events.append(event) or function(*given, **named)

    def repeats(*given, **named):
        events.extend(["unknown size"] if named.get("output_size") is None else [])
        return repeat(*given, **named)

    with mesh(data=2, expert=2) as m, pytest.MonkeyPatch.context() as patch:
        rows = noting("send", sent)
        patch.setattr(
            collectives,
            "start_uneven_all_to_all",
            lambda x, *given: (rows if x.dim() > 1 else sent)(x, *given),
        )
        patch.setattr(Download, "wait", noting("host waits", waited))
        patch.setattr(Exchange, "receive_back", noting("returned", returned))
        patch.setattr(torch.Tensor, "repeat_interleave", repeats)
        patch.setattr(grouped, "has_kernel", lambda parameters: True)
        patch.setattr(torch.nn.functional, "grouped_mm", noting("product", product))
        layer = MixtureOfExperts(H, 8, Routing(2 * E, K), m, bias=True, initializer=layers.Normal(0.5))
        layer.options = ExpertOptions(keep_received=True, repeats_choices=counts)
        initialize(layer.named_parameters(), m.tensor, seed=1)
        block = BesideShared(layer, events)
        apply_activation_checkpointing([block], mode)
        if compiled:
            torch.compiler.reset()
            block.compile(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
        x = torch.randn(T, H, generator=torch.Generator().manual_seed(m.rank), requires_grad=True)
        if counts:
            with torch.no_grad(), counting_choices([layer]):
                block(x.flip(0))
                block(x)
            assert events.count("host waits") == 2
            block(x.flip(0))
            # Training keeps the choices even if its router would choose others.
            layer.router.weight.data.neg_()
            events.clear()
        y = block(x)
        forward = [*events]
        events.clear()
        y.square().sum().backward()
        if counts:  # of both microbatches, which have the same tokens
            assert torch.equal(2 * layer.statistics[: 2 * E], layer.load)
        results = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
        return forward, [*events], results


FORWARD = ["host waits", "send", "product", "product", "send", "shared", "returned"]
# of activations and rows; those of weights and biases are computed while the rows' gradients return
PRODUCTS = ["product", "product", "send", *["product"] * 4, "returned", "returned"]
PASSES = {  # of forward and backward
    ("none", False): (FORWARD, ["send", "shared", *PRODUCTS]),
    ("selective", False): (FORWARD, ["shared", "send", "shared", *PRODUCTS]),
    ("full", False): (FORWARD, [*FORWARD[1:], "send", "shared", *PRODUCTS]),
    # rows are sent again, and multiplied by gate and up
    ("none", True): ([each for each in FORWARD if each != "shared"], ["send", "send", "product", *PRODUCTS]),
    ("selective", True): (
        [each for each in FORWARD if each != "shared"],
        ["send", "send", "product", *PRODUCTS],
    ),
    ("full", True): ([each for each in FORWARD if each != "shared"], ["send", "send", "product", *PRODUCTS]),
}


@pytest.mark.parametrize("counts", [False, True])
def test_host_waits_for_the_numbers_of_rows_once_and_shared_experts_run_beside_the_exchange(pool, counts):
    """Recomputation does not wait and, in graphs, repeats no experts; no other size is unknown.

    If a pass counts choices, it waits, and training does not.
    """
    passes = {given: events for given, events in PASSES.items() if given[0] == "full" or not counts}
    expected: dict[bool, list[torch.Tensor]] = {}  # of eager runs and of graphs, which round differently
    for (mode, compiled), (forward, backward) in passes.items():
        given = {"mode": mode, "compiled": compiled, "counts": counts}
        for rank, found in enumerate(pool.run(passes_of_experts, 2, **given)):
            assert found[:2] == (forward[counts:], backward), (mode, compiled, rank)
            if rank == 0:
                expected.setdefault(compiled, found[2])
                assert all(torch.equal(a, b) for a, b in zip(found[2], expected[compiled], strict=True))
    torch.testing.assert_close(expected[True], expected[False], rtol=1e-5, atol=1e-5)


WIDE = (406, 128, 96)  # oneDNN, where used, computes products of these sizes, with rounded numbers of rows


@pytest.mark.parametrize("sizes", [(T, H, F), WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_grouped_experts_equal_one_by_one_with_gradients(activation, sizes):
    given, indices = inputs(*sizes), choices(sizes[0])
    for name in ("gate_up", "down"):
        given[name] = (given[name] / sizes[1] ** 0.5).detach().requires_grad_()
    arguments = dict(given)
    y = routed_experts(indices=indices, axis=ALONE, activation=activation, **arguments)
    expected = one_by_one(given, indices, activation)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(y)
    tensors = list(given.values())
    found = torch.autograd.grad(y, tensors, grad)
    for name, a, b in zip(given, found, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("limit", "kernel"),
    [(None, False), (None, True), (T // 2, False)],
    ids=["one by one", "grouped", "slots"],
)
def test_low_rank_updates_equal_merged_weights_with_gradients(limit, kernel, monkeypatch):
    """Experts one by one, in grouped products as on GPUs, and in slots with capacity for all tokens."""
    monkeypatch.setattr(grouped, "has_kernel", lambda parameters: kernel)
    given, indices, factors = inputs(), choices(), updates()
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    frozen = given | {name: given[name].detach() for name in names}
    arguments = {name: frozen[name] for name in ("gate_up_bias", "down_bias")} | factors
    base = frozen["x"], frozen["weights"]
    if limit is None:
        y = routed_experts(*base, indices, frozen["gate_up"], frozen["down"], ALONE, **arguments)
    else:
        slot, kept = assign_slots(indices, E, T // 2, limit)
        table = slot, kept, E * 2 * limit
        y = slotted_experts(*base, *table, frozen["gate_up"], frozen["down"], ALONE, **arguments)
    merged = dict(frozen)
    for name in ("gate_up", "down"):
        a, b = factors[f"{name}_update"]
        merged[name] = frozen[name] + b @ a
    expected = one_by_one(merged, indices, "silu")
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    trained = [given["x"], given["weights"], *factors["gate_up_update"], *factors["down_update"]]
    grad = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, trained, grad), torch.autograd.grad(expected, trained, grad), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_capacity_keeps_the_first_tokens_of_each_sample():
    given, indices = inputs(), torch.zeros(T, 1, dtype=torch.int64)
    given["weights"] = given["weights"][:, :1]
    length, limit = T // 2, 4  # two samples, all of whose tokens choose expert 0
    slot, kept = assign_slots(indices, E, length, limit)
    assert kept[:, 0].tolist() == [position < limit for position in range(length)] * 2
    y = slotted_experts(
        given["x"], given["weights"], slot, kept, E * 2 * limit, given["gate_up"], given["down"], ALONE
    )
    dropless = routed_experts(given["x"], given["weights"], indices, given["gate_up"], given["down"], ALONE)
    torch.testing.assert_close(y, dropless * kept, rtol=1e-5, atol=1e-5)


def make_layer(on: Mesh, balance: Balance, **routing: object) -> MixtureOfExperts:
    layer = MixtureOfExperts(H, 4, Routing(4, K, **routing), on, initializer=layers.Normal(0.5))
    layer.options = ExpertOptions(balance)
    initialize(layer.named_parameters(), on.tensor, seed=1)
    return layer


def test_low_rank_updates_can_be_switched_off():
    layer, x = make_layer(Mesh(), Balance()), torch.randn(T, H)
    plain = layer(x, T)
    for projection in (layer.gate_up, layer.down):
        projection.lora = lora.ExpertUpdate(projection.weight, rank=2, scale=1.0)
    initialize(layer.named_parameters(), layer.mesh.tensor, seed=1)
    assert torch.equal(layer(x, T), plain)  # B is zero
    with torch.no_grad():
        layer.down.lora.b.weight.fill_(0.5)
    assert not torch.allclose(layer(x, T), plain)
    with without_updates(layer):
        assert torch.equal(layer(x, T), plain)


PADDING = torch.tensor([[False] * (T // 2), [False, False] + [True] * (T // 2 - 2)])  # of two samples


@pytest.mark.parametrize("padding", [None, PADDING], ids=["complete", "padded"])
def test_batch_balance_of_one_layer_matches_hugging_face(padding):
    layer = make_layer(Mesh(), Balance("batch", coefficient=0.1, samples=2))
    x = torch.randn(T, H)
    (layer(x, T // 2, padding) * 0).sum().backward()
    logits = (x @ layer.router.weight.t()).detach().requires_grad_()
    expected = load_balancing_loss_func((logits,), 4, K, None if padding is None else (~padding).long())
    assert layer.statistics[-2].item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    torch.testing.assert_close(layer.router.weight.grad, 0.1 * logits.grad.t() @ x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "global", "bias", "none"])
def test_padding_has_no_part_in_losses_and_statistics(kind):
    """A padded sample equals one without; if balanced over the step, all tokens count as of one sample."""
    x = torch.randn(2, T // 2, H)
    apart = [x[~PADDING]] if kind == "global" else [x[0], x[1][~PADDING[1]]]

    def gradients(samples: int, *inputs: tuple) -> list[torch.Tensor]:
        balance = Balance(kind, 0.1, 0.0 if kind == "global" else 0.01, samples)
        layer = make_layer(Mesh(), balance, score="sigmoid", selection_bias=True)
        with torch.no_grad(), counting_choices([layer]):
            for given in inputs:
                layer(*given)
        layer.load /= samples
        for given in inputs:
            (layer(*given) * 0).sum().backward()
        loads, z = layer.statistics[:4], layer.statistics[-1]
        signs = (loads - loads.mean()).sign(), layer.router.selection_bias.grad.sign()
        assert len(inputs) > 1 or torch.equal(*signs)  # inputs of different lengths have no common scale
        return [layer.statistics[:-1], layer.router.weight.grad, z * (kind != "global")]

    found = gradients(2, (x.flatten(0, 1), T // 2, PADDING))
    expected = gradients(len(apart), *((tokens, len(tokens)) for tokens in apart))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_dropped_choices_of_padding_are_not_counted():
    layer = make_layer(Mesh(), Balance())
    # An expert takes two tokens of each sample, and all tokens choose the same experts.
    layer.options = ExpertOptions(capacity_factor=0.5)
    (layer(torch.ones(T, H), T // 2, PADDING) * 0).sum().backward()
    assert layer.statistics[-EXTRA] == (T // 2 - 2) * K  # of the first sample; the second has two tokens


def train_with_selection_bias(**degrees: int) -> torch.Tensor:
    """The selection bias after two steps of two microbatches over the same tokens."""
    with mesh(**degrees) as on:
        layer = make_layer(on, Balance("bias"), score="sigmoid", selection_bias=True)
        layer.router.move_selection_bias(0.01)
        optimizer = ShardedAdamW(layer.named_parameters(), on)
        tokens = torch.randn(2, 2, 16, H, generator=torch.Generator().manual_seed(3))
        own = tokens.unflatten(2, (on.data.size, -1))[:, :, on.data.rank]
        for step in own:
            optimizer.begin_step(2)
            for microbatch in step:
                layer(microbatch, len(microbatch)).square().sum().backward()
            optimizer.step(1e-2)
        return layer.router.selection_bias.detach().clone()


def test_selection_bias_follows_the_load_of_the_whole_step(pool):
    expected = train_with_selection_bias()
    assert set(expected.tolist()) - {0.0}
    for found in pool.run(train_with_selection_bias, 2, data=2, expert=2):
        assert torch.equal(found, expected)


def test_selection_bias_of_a_balanced_load_does_not_change():
    """Each microbatch chooses a different expert; the equal share, 2 choices of 5 experts, is fractional."""
    tally, bias = torch.zeros(E + EXTRA, requires_grad=True), torch.zeros(E, requires_grad=True)
    for expert in range(E):  # one microbatch for each, in which all its 2 choices are this expert
        weights = torch.ones(1, 2, requires_grad=True)
        loads = torch.zeros(E).index_fill_(0, torch.tensor(expert), 2.0)
        rest = torch.zeros(2), tally, bias, loads, torch.zeros(())
        record(Balance("bias"), weights, *rest, tensor=1).sum().backward()
    assert bias.grad.tolist() == [0.0] * E
    assert tally.grad[:E].tolist() == [2.0] * E


def test_balance_loss_of_scores_that_underflow_is_finite():
    logits = torch.full((2, E), -160.0, requires_grad=True)
    terms = losses(
        Balance("bias"), logits, logits.sigmoid(), torch.ones(1, E), torch.zeros(E), 1, Mesh().context
    )
    terms[0].backward()
    assert terms[0] == 0
    assert torch.equal(logits.grad, torch.zeros(2, E))


def test_groups_limit_the_choice_to_the_best_group():
    layer = make_layer(Mesh(), Balance(), score="sigmoid", groups=2, top_groups=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = torch.tensor(
            [3.0, -3.0, 1.0, 1.0]
        )  # the best expert is in the worse group
    indices = layer.router(torch.eye(1, H)).indices
    assert sorted(indices[0].tolist()) == [2, 3]


def test_expert_degree_that_does_not_divide_the_experts_is_rejected():
    with pytest.raises(ValueError, match=r"experts = 4 is not divisible by expert = 3; nearest valid: 3, 6"):
        make_layer(Mesh(data=3, expert=3), Balance())


def entries_left_by_failures() -> list[tuple[int, int]]:
    """What is under way when a step's backward, then an evaluation, fails in an exchange; what remains."""
    pending = dropless._outputs, dropless._sent, dropless.counted, exchange._copies
    trainer = Trainer(Case("deepseek_v3", data=2, expert=2, balance="global").profile())
    found: list[int] = []

    def fail(*_: object) -> None:
        found.append(sum(len(each._entries) for each in pending))
        raise RuntimeError("out of memory")

    try:
        initialize(trainer.stages[0].named_parameters(), trainer.mesh.tensor, seed=1)
        shared, samples = trainer.stages[0].layers["2"].shared, Batch(batch(0).chunk(2)[trainer.mesh.rank])
        for register, call, factor in (
            (shared.register_full_backward_pre_hook, trainer.forward_backward, 1.0),
            (shared.register_forward_hook, trainer.evaluate, 4),
        ):
            hook = register(fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                call(samples, factor)
            hook.remove()
            found.append(sum(len(each._entries) for each in pending))
        return [*zip(found[::2], found[1::2], strict=True)]
    finally:
        trainer.mesh.close()


def test_failed_step_or_evaluation_drops_exchanges_under_way(pool):
    """No operator takes the rest of them, and their rows would stay in memory."""
    for found in pool.run(entries_left_by_failures, 2):
        # In backward: gradients, and the choices of two layers for the second microbatch. In evaluation: outputs.
        assert found == [(3, 0), (1, 0)]
