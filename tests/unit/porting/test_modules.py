"""Modules, names in them, and the area in which a name is looked up."""

import pytest

from mfwrap.porting.modules import Imported


@pytest.mark.parametrize(
    ("path", "area", "shown"),
    [
        ("mindspore.nn Dense", "nn", "nn.Dense"),
        ("mindspore.nn.wrap.cell_wrapper TrainOneStepCell", "nn", "nn.TrainOneStepCell"),
        ("mindspore.ops.operations MatMul", "ops", "ops.MatMul"),
        ("mindspore.train.callback Callback", "mindspore", "mindspore.train.callback.Callback"),
        ("mindspore.common.dtype float32", "mindspore", "mindspore.common.dtype.float32"),
        (
            "mindspore.common.initializer Normal",
            "initializer",
            "mindspore.common.initializer.Normal",
        ),
        ("mindspore.dataset.vision.c_transforms Resize", "transforms", "transforms.Resize"),
        ("mindspore.mint.nn Linear", "mint", "mindspore.mint.nn.Linear"),
        ("mindformers.core.callback MFLossMonitor", "mindformers", None),
        ("mindspore.nn.probability.bijector Softplus", "mindspore.nn.probability", None),
    ],
)
def test_the_area_of_a_name(path, area, shown):
    """A name is looked up in the area of the nearest package that has one."""
    imported = Imported(*path.split())

    assert imported.is_known
    assert imported.area == area
    assert shown is None or imported.shown == shown


def test_attributes_of_modules():
    """An attribute of a module is a module if MindSpore has one of this name, otherwise a name."""
    library = Imported("mindspore")

    assert library.attribute("nn") == Imported("mindspore.nn")
    assert library.attribute("nn").attribute("Dense") == Imported("mindspore.nn", "Dense")
    assert library.attribute("Tensor") == Imported("mindspore", "Tensor")


def test_other_libraries():
    """Modules of other libraries are not known, also if their name begins alike."""
    assert not Imported("torch.nn").is_known
    assert not Imported("mindspore_hub").is_known
