"""docs/names.md covers all names in MindSpore's documents, and torch versions of the guides run."""

import ast
import copy
import doctest
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mfwrap import Model, TrainOneStepCell, WithLossCell
from mfwrap.callbacks import LossMonitor
from mfwrap.names import attributes, libraries, training
from support.own_steps import GuidesStep
from support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("name_tables", ROOT / ".ci" / "name_tables.py")
name_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(name_tables)

PAGE = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
DOCUMENTED = {
    # Reference page of nn.TrainOneStepWithLossScaleCell.
    "The step with a loss scale": (
        *("TrainOneStepWithLossScaleCell", "get_overflow_status", "process_loss_scale"),
        *("set_sense_scale", "start_overflow_check", "scale_sense", "Cell", "Tensor", "Parameter"),
        *("construct", "MatMul", "MSELoss", "Momentum", "trainable_params", "WithLossCell"),
        *("DynamicLossScaleUpdateCell", "mstype.float32", "TypeError", "ValueError"),
    ),
    # Source of the loss-scale managers.
    "Loss-scale managers": (
        *("LossScaleManager", "FixedLossScaleManager", "DynamicLossScaleManager", "Model"),
        *("get_loss_scale", "update_loss_scale", "get_update_cell", "get_drop_overflow_update"),
        *("drop_overflow_update", "loss_scale_manager", "FixedLossScaleUpdateCell", "loss_scale"),
        *("scale_factor", "scale_window", "increase_ratio", "decrease_ratio", "cur_iter"),
        *("last_overflow_iter", "bad_step", "bad_step_max", "Momentum", "RuntimeError"),
    ),
    # Guide "Comparison of the training process", which compares three frameworks.
    "The comparison of three frameworks": (
        *("set_context", "GRAPH_MODE", "Accuracy", "SoftmaxCrossEntropyWithLogits", "Model"),
        *("CheckpointConfig", "ModelCheckpoint", "LossMonitor", "model.train", "lenet", "LeNet"),
        *("create_dataset", "GeneratorDataset", "source", "column_names", "column_types"),
        *("num_samples", "num_parallel_workers", "shuffle", "sampler", "num_shards", "shard_id"),
        *("batch", "map", "repeat", "create_dict_iterator", "create_tuple_iterator"),
        *("GradOperation", "get_by_list", "sens_param", "TrainOneStepCell", "sens", "weights"),
        *("grad", "grad_reducer", "backbone_network", "WithLossCell", "set_grad", "ParallelMode"),
        *("DistributedGradReducer", "ops.depend", "F.depend", "fill", "identity"),
    ),
    # Guide on gradients.
    "Gradients": (
        *("mindspore.grad", "mindspore.value_and_grad", "GradOperation", "grad_position"),
        *("weights", "has_aux", "Dense", "set_data", "asnumpy", "StaticLossScaler", "scale"),
        *("unscale", "all_finite", "clip_by_global_norm"),
    ),
    # Reference page of MindFormers' MFTrainOneStepCell.
    "MindFormers' step": (
        *("MFTrainOneStepCell", "network", "optimizer", "use_clip_grad", "max_grad_norm"),
        *("scale_sense", "local_norm", "loss", "overflow", "loss scale", "learning rate"),
        *("global norm", "size", "TypeError", "ValueError"),
    ),
}
"""Public names in MindSpore's and MindFormers' documents, by section of docs/names.md."""


def section(title: str) -> str:
    """Return the text below a heading of docs/names.md."""
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[tuple[str, str]]:
    """Return the first cell (the names) and the last cell (the test) of each row of a table."""
    return re.findall(r"^\| (.+?) \| .+ \| `(tests/.+)` \|$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("title", "name"), [(title, name) for title, names in DOCUMENTED.items() for name in names]
)
def test_each_name_has_a_test(title, name):
    """Every public name in a document has a row in that document's table, with a test."""
    pattern = rf"`[^`]*(?<!\w){re.escape(name)}(?!\w)[^`]*`"

    assert [row for row in rows(section(title)) if re.search(pattern, row[0])]


def test_each_row_is_read():
    """`rows` finds every row of every table."""
    for title in DOCUMENTED:
        lines = [line for line in section(title).splitlines() if line.startswith("| ")]
        assert len(rows(section(title))) == len(lines) - 2


@pytest.mark.parametrize("test", sorted({test for _, test in rows(PAGE)}))
def test_each_test_exists(test):
    """Every test that a table names exists."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))

    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", name_tables.PAGES, ids=lambda page: page.name)
def test_the_tables_of_names_are_those_of_the_table(page):
    """`make names` has nothing to write."""
    text = page.read_text(encoding="utf-8")

    assert "<!-- counterparts -->" in text
    assert name_tables.with_tables(text) == text


def test_every_area_is_on_a_page():
    """Each name and each attribute of the table is on a page."""
    text = "".join(page.read_text(encoding="utf-8") for page in name_tables.PAGES)
    shown = set(re.findall(r"<!-- names: ([^>]+) -->", text))

    # Modules and the functions of a logger are only for `mfwrap port`.
    areas = {*training.ROWS, *libraries.ROWS, *attributes.ROWS}
    assert areas - shown == {"log", "module"}


def test_the_notebook_of_the_comparison_runs():
    """The torch version of MindSpore's comparison notebook prints the notebook's output."""
    pytest.importorskip("sklearn", reason="needs sklearn")
    path = Path(__file__).with_name("comparison_notebook.txt")
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failures, cells = doctest.testfile(
        str(path), module_relative=False, optionflags=options, report=True
    )

    assert cells > 30
    assert failures == 0


def test_what_stands_for_operators():
    """Operators of torch give the results of the MindSpore operators that they replace."""
    loss = torch.tensor(3.0)
    weight = nn.Parameter(torch.ones(2, 3))

    assert torch.equal(torch.full(loss.shape, 8.0, dtype=loss.dtype), torch.tensor(8.0))
    assert torch.equal(torch.matmul(torch.ones(1, 2), weight), torch.ones(1, 2) @ weight)
    assert weight.requires_grad
    assert torch.tensor([1.0]).dtype == torch.float32


def test_what_stands_for_a_dataset():
    """A loader of torch can select samples, convert their dtype, order them and form batches."""
    data = MyDataset(100)
    part = torch.utils.data.Subset(data, range(10))
    loader = torch.utils.data.DataLoader(
        part,
        batch_sampler=torch.utils.data.BatchSampler(
            torch.utils.data.SequentialSampler(part), 4, drop_last=True
        ),
        collate_fn=lambda rows: (
            torch.stack([torch.from_numpy(data) for data, _ in rows]).half(),
            torch.tensor([float(label[0]) for _, label in rows]),
        ),
    )
    batches = list(loader)

    assert [(data.shape, data.dtype, label.sum().item()) for data, label in batches] == [
        (torch.Size([4, 3, 4, 5]), torch.float16, 4.0)
    ] * 2


@pytest.mark.parametrize("sens", [1.0, 4.0])
def test_the_guides_own_step(sens):
    """The guide's step gives the same losses and weights as the cell, also in `Model`."""
    network = WithLossCell(nn.Linear(3, 1), nn.MSELoss())
    assert network.backbone_network is network.backbone
    other = copy.deepcopy(network)
    ours, theirs = (
        kind(one, torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9), sens)
        for kind, one in ((TrainOneStepCell, network), (GuidesStep, other))
    )
    batch = torch.randn(8, 3), torch.randn(8, 1)

    for _ in range(3):
        torch.testing.assert_close(theirs(*batch), ours(*batch))
    Model(ours).train(2, [batch])
    Model(theirs).train(2, [batch])
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two, one)


class MyDataset(torch.utils.data.Dataset):
    """The guide's dataset of zeros and ones, without the guide's bug in ``__getitem__``."""

    def __init__(self, n):
        self.data = [np.zeros((3, 4, 5), np.float32) for _ in range(n)]
        self.label = [np.ones(1, np.float32) for _ in range(n)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, idx):
        return self.data[idx], self.label[idx]


def test_the_guides_training_prints_its_numbers(capsys):
    """The guide's training prints the losses that a computation by hand gives."""
    dataset = MyDataset(100)
    loader = torch.utils.data.DataLoader(dataset, batch_size=25)
    assert (len(dataset), dataset[0][0].shape, float(dataset[0][1][0])) == (100, (3, 4, 5), 1.0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(60, 1))
    nn.init.zeros_(network[1].bias)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    Model(network, nn.MSELoss(), optimizer).train(1, loader, callbacks=LossMonitor())

    # The inputs are zero, so only the bias learns; the label is 1.
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
