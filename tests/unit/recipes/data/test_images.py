"""Folders of images are classes, and images of different sizes need `image_size`."""

import PIL.Image
import pytest

from mfwrap.runner import RecipeError
from mfwrap.runner.run import checked_rows
from support.recipe_data import recipe_of, trainer_of
from support.recipe_texts import VIT

# Ignore the warnings that datasets emits.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_images(folder, sizes, mode="RGB"):
    """Make a folder for each class, with one image of each size."""
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for index, size in enumerate(sizes):
            color = (10 * index, 100 * number, 0) if mode == "RGB" else 10 * index
            PIL.Image.new(mode, size, color).save(folder / name / f"{index}.png")
    return str(folder)


def test_folders_are_classes(tmp_path):
    """The name of the folder that an image is in is its class; no type is needed."""
    section = {"path": make_images(tmp_path / "photos", [(8, 8)] * 4), "eval_fraction": 0}
    rows = checked_rows(recipe_of("image_classification", section, model=VIT))

    assert rows.train.features["label"].names == ["cat", "dog"]
    assert rows.train["label"][:] == [0] * 4 + [1] * 4
    assert rows.train[5]["image"].size == (8, 8)


def test_a_folder_of_held_out_images(tmp_path):
    """A class has the same number in both folders, also if one of them lacks another class."""
    make_images(tmp_path / "photos", [(8, 8)])
    make_images(tmp_path / "held", [(8, 8)])
    (tmp_path / "held" / "cat" / "0.png").unlink()
    section = {"path": str(tmp_path / "photos"), "eval_path": str(tmp_path / "held")}
    rows = checked_rows(recipe_of("image_classification", section, model=VIT))

    assert rows.train["label"][:] == [0, 1]
    assert rows.evaluation["label"][:] == [1]


@pytest.mark.parametrize("held_out", [False, True])
def test_the_name_of_a_folder_is_no_pattern(tmp_path, held_out):
    """A folder with brackets in its name is read, not the one that the name would match."""
    make_images(tmp_path / "photos1", [(8, 8)])
    section = {"path": make_images(tmp_path / "photos[1]", [(8, 8)] * 3)}
    if held_out:
        section["eval_path"] = make_images(tmp_path / "held[1]", [(8, 8)])
    else:
        section["eval_fraction"] = 0
    rows = checked_rows(recipe_of("image_classification", section, model=VIT))

    assert len(rows.train) == 6
    assert not held_out or len(rows.evaluation) == 2


def test_folders_of_splits(tmp_path):
    """Folders named train and test are the training rows and the held-out rows."""
    make_images(tmp_path / "train", [(8, 8), (8, 8)])
    make_images(tmp_path / "test", [(8, 8)])
    section = {"path": str(tmp_path)}
    rows = checked_rows(recipe_of("image_classification", section, model=VIT))

    assert (len(rows.train), len(rows.evaluation)) == (4, 2)


def test_images_of_different_sizes(tmp_path):
    """Images of different sizes are an error that names the file, unless they are scaled."""
    folder = make_images(tmp_path / "photos", [(8, 8), (9, 8), (12, 20)])
    section = {"path": folder, "eval_fraction": 0}
    says = (
        r"must have an image of 8 x 8 pixels, mode RGB \(as in row 1\) in each row of column "
        r"`image`, got 9 x 8 pixels, mode RGB in row 2 \(counted from 1\), at .*/cat/1\.png; "
        r"nor do 3 other rows fit: 3, 5, 6$"
    )
    with pytest.raises(RecipeError, match=says):
        checked_rows(recipe_of("image_classification", section, model=VIT))

    trainer = trainer_of("image_classification", section | {"image_size": 16}, model=VIT)
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(6)])
    assert batch["pixel_values"].shape == (6, 3, 16, 16)
    assert trainer.model.config.image_size == 16


def test_held_out_images_are_like_the_others(tmp_path):
    """A held-out image of another mode than the images for training is an error."""
    section = {
        "path": make_images(tmp_path / "photos", [(8, 8)]),
        "eval_path": make_images(tmp_path / "held", [(8, 8)], mode="L"),
    }
    with pytest.raises(
        RecipeError, match=r"mode L in row 1 .* of the held-out rows, at .*held/cat"
    ):
        checked_rows(recipe_of("image_classification", section, model=VIT))


def test_a_folder_must_have_images(tmp_path):
    """A folder without images is an error when the recipe is parsed."""
    section = {"type": "image_folder", "path": str(tmp_path)}
    with pytest.raises(RecipeError, match=r"data\.path: must be a folder with images"):
        recipe_of("image_classification", section, model=VIT)


def test_only_images_can_be_scaled():
    """Rows of numbers cannot be scaled, and other tasks have no images."""
    section = {"type": "digits", "image_size": 16}
    with pytest.raises(RecipeError, match="must have an image file in each row of column `image`"):
        checked_rows(recipe_of("image_classification", section, model=VIT))
    with pytest.raises(RecipeError, match=r"data\.image_size: is not a setting of the task"):
        recipe_of("causal_lm", {"type": "python_topics", "image_size": 16})


def test_a_folder_of_held_out_images_alone(tmp_path):
    """A class that only held-out images have is an error that names the image."""
    make_images(tmp_path / "photos", [(8, 8)])
    make_images(tmp_path / "held", [(8, 8)])
    (tmp_path / "held" / "dog").rename(tmp_path / "held" / "emu")
    section = {"path": str(tmp_path / "photos"), "eval_path": str(tmp_path / "held")}
    says = r"data\.eval_path: must have only classes of the training images, \['cat', 'dog'\], "

    with pytest.raises(RecipeError, match=rf"{says}.*, got 'emu' at .*held/emu/0\.png"):
        checked_rows(recipe_of("image_classification", section, model=VIT))
