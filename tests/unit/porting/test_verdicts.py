"""What stands for an imported name."""

import pytest

from mfwrap.porting.modules import Imported
from mfwrap.porting.verdicts import of_name


@pytest.mark.parametrize(
    ("module", "name", "verdict", "text"),
    [
        ("mindspore.nn", "TrainOneStepCell", "same", "`mfwrap.TrainOneStepCell`"),
        ("mindspore.train.callback", "LossMonitor", "same", "`mfwrap.callbacks.LossMonitor`"),
        ("mindformers.core", "CosineWithWarmUpLR", "same", "`mfwrap.schedules.CosineWithWarmUpLR`"),
        ("mindspore.ops.composite", "GradOperation", "same", "`mfwrap.GradOperation`"),
        ("mindspore.nn", "Dense", "write", "`torch.nn.Linear`"),
        ("mindspore.mint", "matmul", "write", "`torch.matmul`"),
        ("mindspore.mint.nn.functional", "relu", "write", "`torch.nn.functional.relu`"),
        ("mindspore.experimental.optim", "AdamW", "write", "`torch.optim.AdamW`"),
        (
            "mindspore.experimental.optim.lr_scheduler",
            "CosineAnnealingLR",
            "write",
            "`torch.optim.lr_scheduler.CosineAnnealingLR`",
        ),
        ("mindspore.ops", "depend", "leave out", "nothing: statements of torch run in their order"),
        (
            *("mindspore.numpy", "arange", "write"),
            "`numpy.arange` for arrays, and torch's function for tensors, which may differ",
        ),
        ("mindspore.nn", None, "write", None),
        ("mindspore.nn.layer.basic", None, "write", None),
    ],
)
def test_what_stands_for_a_name(module, name, verdict, text):
    """The table comes first, then the names of mfwrap, then those of torch."""
    found = of_name(Imported(module, name))

    assert found.verdict == verdict
    assert text is None or found.text == text


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mindspore", "NoSuchName"),
        ("mindspore.mint", "no_such_function"),
        ("mindspore.numpy", "no_such_function"),
        ("mindspore.nn", "*"),
        # MindFormers' own layers are not those of MindSpore.
        ("mindformers.modules", "Dropout"),
        # A name of mfwrap in a package where it means something else.
        ("mindspore.nn.probability", "Model"),
        ("mindspore.nn.probability", None),
    ],
)
def test_what_is_unknown(module, name):
    """What neither the table nor a package has is unknown: no similar name is taken."""
    assert of_name(Imported(module, name)) is None
