"""FLOPs of an update against closed formulas, and peak rates of devices."""

import pytest
import torch
from torch import nn

from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks.loss_monitor.flops import StepFlops, peak_tflops
from support.monitored_loop import Loop, output, shown
from support.small_llama import byte_batch, small_llama


def counted(network: nn.Module, *batches) -> float:
    """Return the FLOPs counted during one update of a cell."""
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    cell, flops = MFTrainOneStepCell(network, optimizer, use_clip_grad=True), StepFlops()
    flops.start(network)
    cell.step(batches)
    flops.stop()
    return flops.value


class LinearMean(nn.Module):
    """One matrix product and the mean of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, inputs):
        return self.linear(inputs).mean()


def test_linear_layer():
    """A linear layer counts two products: its output and the gradient of its weights."""
    assert counted(LinearMean(), torch.ones(7, 12)) == 2 * (2 * 7 * 12 * 5)


def test_all_micro_batches():
    """All micro-batches of an update are counted, whatever their sizes."""
    micro_batches = [torch.ones(rows, 12) for rows in (7, 2, 3)]

    assert counted(LinearMean(), *micro_batches) == 2 * (2 * 12 * 12 * 5)


@pytest.mark.parametrize(
    ("attention", "products"),
    # Fused attention computes its logits a second time in the backward pass.
    [("eager", 6), ("sdpa", 7)],
)
def test_llama(attention, products):
    """A Llama counts 6 FLOPs per weight and token, plus the products of its attention."""
    network = small_llama()
    network.set_attn_implementation(attention)
    config, (pieces, length) = network.config, (3, 16)
    linear = [m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear)]
    batch = byte_batch([length] * pieces)
    # Without a mask, torch takes the fused kernel.
    del batch["attention_mask"]
    weights = 6 * sum(linear) * pieces * length
    product = 2 * pieces * length * length * config.hidden_size

    expected = weights + products * product * config.num_hidden_layers
    # Some releases of transformers compute the angles of rotary embeddings as a matrix product,
    # which also counts.
    angles = length * config.hidden_size // config.num_attention_heads
    assert counted(network, batch) in {expected, expected + angles}


def counting() -> bool:
    """Return whether a dispatch mode, such as a FLOP counter, is active."""
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def test_every_update_but_the_first_is_left_alone():
    """Only the first update is counted, and counting does not change the losses."""
    losses, active = [], []
    for count in (False, True):
        torch.manual_seed(0)
        network = LinearMean()
        cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))
        loop = Loop(model=network, count_flops=count)
        loop.send("on_train_begin")
        for _ in range(3):
            loop.send("on_step_begin")
            active.append(counting())
            step_output = cell(torch.ones(2, 12))
            losses.append(step_output.loss.item())
            loop.state.global_step += 1
            loop.send("on_step_end", step_output=step_output)
            assert not counting()

    assert losses[:3] == losses[3:]
    assert active == [False, False, False, True, False, False]


def test_record_of_a_counted_update(caplog):
    """The record shows the device's TFLOP/s and its share of the given peak."""
    network = LinearMean()
    cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))
    loop = Loop(model=network, count_flops=True, peak_tflops=8.0)
    loop.send("on_train_begin")
    for terascale in (2.0, 4.0):
        loop.send("on_step_begin")
        step_output = cell(torch.ones(7, 12))
        loop.clock.now += 2 * (2 * 7 * 12 * 5) / 1e12 / terascale
        loop.state.global_step += 1
        loop.send("on_step_end", step_output=step_output)
    loop.send("on_train_end")

    assert shown(caplog, r"global_norm: None(.*)") == [
        ", train_throughput_per_npu: 2.000T, mfu: 25.0%",
        ", train_throughput_per_npu: 4.000T, mfu: 50.0%",
    ]


def test_operations_that_are_given(caplog):
    """With `flops_per_step` the TFLOP/s are shown; without a peak rate there is no mfu."""
    loop = Loop(flops_per_step=3e12)
    loop.send("on_train_begin")
    loop.step(output(), seconds=2.0)
    loop.send("on_train_end")

    assert shown(caplog, r"global_norm: \[3.\](.*)") == [", train_throughput_per_npu: 1.500T"]


def compiled_module() -> nn.Module:
    """Return a module that contains a compiled module."""
    return nn.Sequential(torch.compile(LinearMean(), backend="eager"))


def module_compiled_in_place() -> nn.Module:
    """Return a module compiled in place."""
    network = LinearMean()
    network.compile(backend="eager")
    return network


@pytest.mark.parametrize("make_network", [compiled_module, module_compiled_in_place])
def test_a_compiled_network(make_network, caplog):
    """A compiled network is not counted, and one warning says so."""
    loop = Loop(model=make_network(), count_flops=True)
    loop.send("on_train_begin")
    for _ in range(2):
        loop.step(output())
    loop.send("on_train_end")

    assert shown(caplog, r"global_norm: \[3.\](.*)") == ["", ""]
    (warning,) = warnings(caplog)
    assert warning == (
        "MFLossMonitor cannot show FLOPs: operations of a compiled network cannot be counted. "
        "Give `flops_per_step` instead of `count_flops`."
    )


def warnings(caplog) -> list[str]:
    """Return the warnings about FLOPs."""
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "FLOPs" in message]


def test_nothing_to_count(caplog):
    """An update without matrix products, or without `on_step_begin`, causes one warning."""
    for begin in (True, False):
        flops = StepFlops()
        for _ in range(2):
            if begin:
                flops.start(None)
            flops.stop()
        assert flops.value is None

    assert [message.split(": ")[1].split(".")[0] for message in warnings(caplog)] == [
        "the first update had no operation that can be counted",
        "`on_step_begin`, where counting begins, was not called",
    ]


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_end"])
def test_a_count_that_broke_off(event):
    """If an update raises, the end of the run or the start of the next run stops the count."""
    loop = Loop(count_flops=True)
    loop.send("on_train_begin")
    loop.send("on_step_begin")
    assert counting()

    loop.send(event)
    assert not counting()


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("Tesla T4", 65.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI250X", 191.5),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Some device", None),
    ],
)
def test_peak_rates(name, rate):
    """A device gets the rate of its exact name, not the rate of a similar name."""
    assert peak_tflops(name) == rate
