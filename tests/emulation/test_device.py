"""The emulated device alone, on two forked ranks: what it rejects, leaves undefined and counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel import device
from tests.forked_jobs import run_forked

NEURON = "neuron"


def ones(*shape: int, **options: object) -> torch.Tensor:
    return torch.ones(*shape, device=NEURON, **options)


def change_an_input_of_a_collective() -> None:
    out, own = ones(4), ones(2)
    work = dist.all_gather_single(out, own, async_op=True)
    own.zero_()
    work.wait()


def use_the_device_in_a_thread() -> None:
    raised = []

    def run() -> None:
        try:
            ones(2).add_(1)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="saver")
    thread.start()
    thread.join()
    for error in raised:
        raise error


def compile_a_collective_of_an_unknown_group() -> None:
    from tests.emulation.compiler import _compile

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "unknown")))
    _compile(torch.fx.GraphModule({}, graph), [])


REJECTED: dict[str, tuple[Callable[[], object], str]] = {
    "float64 made": (lambda: ones(2, dtype=torch.float64), "float64 on the device"),
    "float64 computed": (lambda: ones(2).double(), "float64 on the device"),
    "float64 copied": (lambda: torch.ones(2, dtype=torch.float64).to(NEURON), "float64 on the device"),
    "an operand on the host": (lambda: ones(2) + torch.ones(2), "on the same device"),
    "an index on the host": (lambda: ones(2)[torch.tensor([0])], "a tensor of shape (1,) on cpu"),
    "a single index on the host": (
        lambda: ones(2).index_select(0, torch.tensor(0)),
        "a tensor of shape () on cpu",
    ),
    "a generator of the host": (
        lambda: torch.rand(2, device=NEURON, generator=torch.Generator()),
        "a generator on cpu",
    ),
    "a generator of the host, in place": (
        lambda: ones(2).uniform_(generator=torch.Generator()),
        "a generator on cpu",
    ),
    "a host tensor in a collective": (lambda: dist.all_reduce(torch.ones(2)), "a tensor on cpu"),
    "a collective of strided memory": (lambda: dist.all_reduce(ones(4, 4).t()), "not contiguous"),
    "an uneven collective": (
        lambda: dist.all_to_all_single(ones(3), ones(3), [1, 2], [1, 2]),
        "uneven: [1, 2], [1, 2]",
    ),
    "a sum of integers": (lambda: dist.all_reduce(ones(2, dtype=torch.int32)), "a reduction of integers"),
    "a compiled collective of an unknown group": (
        compile_a_collective_of_an_unknown_group,
        "all_reduce.default over 'unknown': its groups on all ranks are not known",
    ),
    "an input that changes": (change_an_input_of_a_collective, "an input was changed before"),
    "a thread without a device": (use_the_device_in_a_thread, "thread saver uses the device without"),
}


def fresh() -> list[float]:
    return device.Download(torch.empty(2, device=NEURON)).wait().tolist()


def reduced(wait: bool) -> list[float]:
    x = ones(2)
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    found = x.cpu().tolist()
    work.wait()
    return found


def downloaded(wait: bool) -> list[float]:
    download = device.Download(ones(2))
    return (download.wait() if wait else download.host).tolist()


VALUES: dict[str, tuple[Callable[[], list[float]], list[float]]] = {
    "fresh memory": (fresh, [torch.nan] * 2),
    "a collective before the wait": (lambda: reduced(False), [torch.nan] * 2),
    "a collective after the wait": (lambda: reduced(True), [2.0, 2.0]),
    "a copy to the host before the wait": (lambda: downloaded(False), [torch.nan] * 2),
    "a copy to the host after the wait": (lambda: downloaded(True), [1.0, 1.0]),
    "a number of the host": (lambda: (ones(2) + torch.tensor(1.0)).cpu().tolist(), [2.0, 2.0]),
}


def mask() -> torch.Tensor:
    return ones(2) > 0


READ, EAGER = "host waits for the device", "operator outside compiled programs"
COUNTED: dict[str, tuple[Callable[[], object], str, dict[str, int]]] = {
    "an item": (lambda: ones(()).item(), READ, {"elsewhere _local_scalar_dense": 1}),
    "a truth value": (lambda: bool(ones(())), READ, {"elsewhere _local_scalar_dense": 1}),
    "a comparison": (lambda: torch.equal(ones(2), ones(2)), READ, {"elsewhere equal": 1}),
    "a blocking copy": (lambda: ones(2).cpu(), READ, {"elsewhere copy": 1}),
    "a synchronization": (lambda: torch.accelerator.synchronize(), READ, {"elsewhere device": 1}),
    "an event": (lambda: downloaded(True), READ, {"parallel/device.py:Download.wait event": 1}),
    "a copy from pageable memory": (
        lambda: torch.ones(2).to(NEURON, non_blocking=True),
        "copy that blocks",
        {"elsewhere torch.float32": 1},
    ),
    "a copy from page-locked memory": (
        lambda: device.upload(torch.ones(2), torch.device(NEURON)),
        "copy that blocks",
        {},
    ),
    "an upload": (
        lambda: device.upload(torch.ones(2), torch.device(NEURON)),
        "copy to the device",
        {"parallel/device.py:upload torch.float32": 1},
    ),
    "an operator": (lambda: ones(2).exp(), EAGER, {"elsewhere ones": 1, "elsewhere exp": 1}),
    **{
        name: (run, "shape depends on data", {f"elsewhere {operator}": 1})
        for name, operator, run in (
            ("nonzero", "nonzero", lambda: ones(2).nonzero()),
            ("masked_select", "masked_select", lambda: ones(2).masked_select(mask())),
            ("unique", "_unique2", lambda: ones(2).unique()),
            ("repeats", "repeat_interleave", lambda: ones(2).repeat_interleave(ones(2, dtype=torch.long))),
        )
    },
    "a boolean index": (
        lambda: ones(2)[mask()],
        "shape depends on data",
        {"elsewhere nonzero": 1, "elsewhere index": 1},
    ),
    "repeats of a known number": (
        lambda: ones(2).repeat_interleave(ones(2, dtype=torch.long), output_size=2),
        "shape depends on data",
        {},
    ),
    "an index": (
        lambda: ones(2)[torch.zeros(1, dtype=torch.long, device=NEURON)],
        "shape depends on data",
        {},
    ),
}


def main(arguments: list[str]) -> int:
    """Run every case; write what each did to FOLDER/RANK.json."""
    from tests.emulation import usage
    from tests.emulation.device import install

    install()
    device.NEURON.start_process_group(device.NEURON.set_current())
    found: dict[str, object] = {}
    for name, (run, _) in REJECTED.items():
        try:
            run()
            found[name] = "accepted"
        except RuntimeError as error:
            found[name] = str(error)
    found |= {name: run() for name, (run, _) in VALUES.items()}
    for name, (run, kind, _) in COUNTED.items():
        usage.take()
        run()
        found[name] = usage.take().get(kind, {})
    (Path(arguments[0]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What every case did, on each rank."""
    folder = tmp_path_factory.mktemp("device")
    code, output = run_forked("tests.emulation.test_device", [folder], 2)
    assert code == 0, output[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", REJECTED)
def test_device_rejects_what_accelerators_do_not_support(name, found):
    assert all(REJECTED[name][1] in rank[name] for rank in found), found


@pytest.mark.parametrize("name", VALUES)
def test_device_leaves_undefined_what_is_not_waited_for(name, found):
    for rank in found:
        assert rank[name] == pytest.approx(VALUES[name][1], nan_ok=True)


@pytest.mark.parametrize("name", COUNTED)
def test_device_counts_by_call_site(name, found):
    assert [rank[name] for rank in found] == [COUNTED[name][2]] * 2
