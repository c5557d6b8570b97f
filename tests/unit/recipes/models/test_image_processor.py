"""Pixels are scaled as the image processor of a checkpoint does, and it is saved with the model."""

import json

import numpy as np
import PIL.Image
import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mfwrap.recipes.models.image_processor import make_image_processor, pixel_values
from mfwrap.runner import RecipeError, run_recipe
from mfwrap.runner.preview import preview
from support.recipe_data import recipe_of, trainer_of
from support.recipe_texts import VIT

# Ignore the warnings that datasets emits.
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {key: size for key, size in VIT["config"].items() if key != "model_type"}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


@pytest.fixture
def photos(tmp_path):
    """Write random images of two classes; return their folder."""
    draw = np.random.default_rng(0)
    for index in range(8):
        folder = tmp_path / "photos" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "photos"


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that saves a model with an image processor, and returns its folder."""

    def save(processor=None, *, num_channels=3, size=8):
        folder = tmp_path / "base"
        config = ViTConfig(**SIZES, image_size=size, num_channels=num_channels)
        ViTForImageClassification(config).save_pretrained(folder)
        if processor is not None:
            file = folder / "preprocessor_config.json"
            file.write_text(json.dumps({"image_processor_type": "ViTImageProcessor", **processor}))
        return {"path": str(folder)}

    return save


def of_files(folder, scale, size=None):
    """Return the pixels of all images, scaled by numpy and PIL alone."""
    images = [PIL.Image.open(file) for file in sorted(folder.rglob("*.png"))]
    if size is not None:
        images = [image.resize((size, size), PIL.Image.Resampling.BICUBIC) for image in images]
    values = np.stack([np.asarray(image, np.float64) for image in images])
    return torch.from_numpy(scale(values).transpose(0, 3, 1, 2)).float()


SCALES = {
    "none": (None, lambda values: values / 127.5 - 1),
    "imagenet": (
        IMAGENET,
        lambda values: (values / 255 - IMAGENET["image_mean"]) / IMAGENET["image_std"],
    ),
    "rescaled": ({"do_normalize": False, "rescale_factor": 0.5}, lambda values: values / 2),
    "raw": ({"do_rescale": False, "do_normalize": False}, lambda values: values),
}


@pytest.mark.parametrize("size", [None, 12])
@pytest.mark.parametrize("name", SCALES)
def test_pixels_are_those_of_the_checkpoint(tmp_path, photos, checkpoint, name, size):
    """A batch has the checkpoint's scale, and so has the processor that is saved with the model."""
    processor, scale = SCALES[name]
    data = {"path": str(photos), "eval_fraction": 0}
    data |= {} if size is None else {"image_size": size}
    model = checkpoint(processor, size=size or 8)
    recipe = recipe_of("image_classification", data, model=model, max_steps=1,
                       output_dir=str(tmp_path / "run"))  # fmt: skip
    run_recipe(recipe)
    trainer = trainer_of("image_classification", data, model=model)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(8)])

    expected = of_files(photos, scale, size)
    torch.testing.assert_close(batch["pixel_values"], expected, rtol=1e-5, atol=1e-5)
    saved = AutoImageProcessor.from_pretrained(tmp_path / "run" / "model")
    files = sorted(photos.rglob("*.png"))
    again = saved([PIL.Image.open(file) for file in files], return_tensors="pt")["pixel_values"]
    assert torch.equal(again, batch["pixel_values"])
    lines = preview(recipe, 8)
    low, high = (float(end) for end in (expected.min(), expected.max()))
    shown = [line for line in lines if "values from" in line]
    assert min(float(line.split()[-5]) for line in shown) == pytest.approx(low, rel=0.01)
    assert max(float(line.split()[-3].strip(",")) for line in shown) == pytest.approx(
        high, rel=0.01
    )


@pytest.mark.parametrize("kind", ["array", "picture"])
def test_values_from_0_to_1_are_pixels_from_0_to_255(kind):
    """A table of floats, which says nothing else, gets the scale of the same picture of bytes."""
    values = np.arange(256).reshape(16, 16) / 255
    picture = PIL.Image.fromarray((values * 255).round().astype(np.uint8))
    numbers = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    numbers |= {"image_mean": [0.1], "image_std": [0.2]}
    processor = make_image_processor(numbers, picture, None)
    images = [{"array": values.tolist(), "picture": picture}[kind]]

    expected = torch.from_numpy((values - 0.1) / 0.2).float()[None, None]
    torch.testing.assert_close(pixel_values(processor, images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA"])
def test_all_channels_are_kept(mode):
    """Without a size, an image keeps its channels, and black is -1."""
    image = PIL.Image.new(mode, (5, 4))
    found = pixel_values(make_image_processor(None, image, None), [image])

    assert found.shape == (1, len(image.getbands()), 4, 5)
    assert found.dtype == torch.float32
    assert bool((found == -1).all())
    if mode == "1":
        white = PIL.Image.new(mode, (5, 4), 1)
        assert bool((pixel_values(make_image_processor(None, white, None), [white]) == 1).all())


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ({"image_mean": [0.5] * 2, "image_std": [0.5] * 2}, "of 3 channels, got .*image_mean"),
        ({"image_mean": [0.5] * 3, "image_std": [0.0] * 3}, "values are not finite"),
        ({"image_processor_type": "NoImageProcessor"}, "image processor that can be loaded, got"),
    ],
)
def test_an_image_processor_that_does_not_fit(photos, checkpoint, processor, says):
    """The error names the key, before the training."""
    with pytest.raises(RecipeError, match=rf"^r:\d+: model\.path: must have an .*{says}"):
        trainer_of("image_classification", {"path": str(photos)}, model=checkpoint(processor))


def test_code_of_an_image_processor(photos, checkpoint):
    """An image processor with code of its own is refused when the recipe is read."""
    model = checkpoint({"auto_map": {"AutoImageProcessor": "mine.Mine"}})
    with pytest.raises(RecipeError, match=r"without remote code \(auto_map in .*preprocessor_con"):
        recipe_of("image_classification", {"path": str(photos)}, model=model)


@pytest.mark.parametrize("make", [trainer_of, lambda *args, **kw: preview(recipe_of(*args, **kw))])
def test_a_model_for_images_with_other_channels(photos, checkpoint, make):
    """Images with more channels than a model takes are refused before the training."""
    data = {"path": str(photos)}
    with pytest.raises(
        RecipeError, match=r"model\.path: must be a model with num_channels 3, .* got 1;"
    ):
        make("image_classification", data, model=checkpoint(IMAGENET, num_channels=1))
    model = {"config": VIT["config"] | {"num_channels": 1}}
    with pytest.raises(RecipeError, match=r"model\.config\.num_channels: must be 3, .* got 1;"):
        make("image_classification", data, model=model)
