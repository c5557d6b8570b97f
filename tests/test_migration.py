"""docs/migration.md names what MindSpore's documents name, and the guide's numbers hold."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mfwrap import Model
from mfwrap.callbacks import LossMonitor

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
DOCUMENTED = (
    # the reference page of the step with a loss scale
    *("TrainOneStepWithLossScaleCell", "get_overflow_status", "process_loss_scale"),
    *("set_sense_scale", "start_overflow_check", "WithLossCell", "DynamicLossScaleUpdateCell"),
    *("MSELoss", "Momentum"),
    # the source of the managers
    *("LossScaleManager", "FixedLossScaleManager", "DynamicLossScaleManager", "get_loss_scale"),
    *("update_loss_scale", "get_update_cell", "get_drop_overflow_update"),
    "FixedLossScaleUpdateCell",
    # the guide that compares three frameworks
    *("set_context", "Accuracy", "SoftmaxCrossEntropyWithLogits", "CheckpointConfig"),
    *("ModelCheckpoint", "LossMonitor", "Model", "model.train", "lenet", "GeneratorDataset"),
    *("create_dict_iterator", "create_tuple_iterator", "GradOperation", "Cell", "construct"),
    *("TrainOneStepCell", "DistributedGradReducer", "depend", "fill", "identity"),
    # the reference page of MindFormers' step
    "MFTrainOneStepCell",
)
"""Public names in MindSpore's and MindFormers' documents of a training step."""


def rows() -> list[tuple[str, str]]:
    """Return names and test of each row of the last table."""
    table = PAGE.partition("## Where each name is tested")[2]
    return re.findall(r"^\| (.+) \| `(tests/.+)` \|$", table, re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_each_name_has_a_test(name):
    """Every public name stands in the table of tests."""
    pattern = rf"(?<!\w){re.escape(name)}(?!\w)"

    assert [row for row in rows() if re.search(pattern, row[0])]


@pytest.mark.parametrize("test", sorted({test for _, test in rows()}))
def test_each_test_exists(test):
    """What the table names is there."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))

    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_pages_of_the_guide_are_named():
    """Names that PyTorch has no use for have what stands for them in the first table."""
    names = PAGE.partition("## Names")[2].partition("\n## ")[0]

    for name in ("nn.Cell", "construct", "set_context", "ops.depend", "ops.fill", "ops.identity"):
        assert name in names


class MyDataset(torch.utils.data.Dataset):
    """The guide's dataset of zeros and ones, mended."""

    def __init__(self, n):
        self.data = [np.zeros((3, 4, 5), np.float32) for _ in range(n)]
        self.label = [np.ones(1, np.float32) for _ in range(n)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return self.data[idx], self.label[idx]


def test_the_guides_training_prints_its_numbers(capsys):
    """The guide's data, rate and momentum give the losses of the same steps by hand."""
    dataset = MyDataset(100)
    loader = torch.utils.data.DataLoader(dataset, batch_size=25)
    assert (len(dataset), dataset[0][0].shape, float(dataset[0][1][0])) == (100, (3, 4, 5), 1.0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(60, 1))
    nn.init.zeros_(network[1].bias)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    Model(network, nn.MSELoss(), optimizer).train(1, loader, callbacks=LossMonitor())

    # Inputs are zero: the bias alone learns the label 1.
    bias = velocity = 0.0
    expected = []
    for step in range(1, 5):
        expected.append((step, (bias - 1) ** 2))
        velocity = 0.9 * velocity + 2 * (bias - 1)
        bias -= 0.01 * velocity
    found = re.findall(r"epoch: 1 step: (\d), loss is (\S+)", capsys.readouterr().out)
    assert [int(step) for step, _ in found] == [step for step, _ in expected]
    torch.testing.assert_close(
        [float(loss) for _, loss in found], [loss for _, loss in expected], rtol=1e-6, atol=0
    )


def test_the_guides_recorded_graph():
    """A tensor knows the functions that made it, as the guide shows of PyTorch."""
    x = torch.ones(2, 2, requires_grad=True)
    y = x * 2 - 1
    y.backward(y)

    assert type(y.grad_fn).__name__ == "SubBackward0"
    assert type(y.grad_fn.next_functions[0][0]).__name__ == "MulBackward0"
    assert torch.equal(x.grad, torch.full((2, 2), 2.0))
