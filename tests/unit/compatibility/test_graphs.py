"""Graphs are made with what a version of torch has for a device."""

import pytest
import torch

from mfwrap.compatibility.graphs import capturing, lacks_graphs, new_graph


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_cpu_needs_no_graph_and_cuda_has_its_own(kind):
    """On these devices every supported version of torch can run captured steps."""
    assert not lacks_graphs(torch.device(kind))


def test_other_devices_need_the_graph_of_accelerators():
    """Without ``torch.accelerator.Graph``, no other device has graphs."""
    assert lacks_graphs(torch.device("xpu")) != hasattr(torch.accelerator, "Graph")


@pytest.mark.cuda
def test_a_graph_computes_only_when_it_is_replayed():
    """What is queued within the block is recorded, also on a stream of one's own."""
    device = torch.device("cuda", 0)
    value, stream = torch.zeros(3, device=device), torch.Stream(device)
    graph = new_graph(device)
    stream.wait_stream(torch.accelerator.current_stream(device))

    with stream, capturing(graph, device):
        value += 1
    torch.accelerator.synchronize(device)
    assert value.tolist() == [0, 0, 0]
    for _ in range(2):
        graph.replay()

    assert value.tolist() == [2, 2, 2]
