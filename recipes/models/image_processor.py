"""The image processor of a model: how the pixels of an image become the values that it takes."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

# Before 5.20, the name in `transformers` itself raises without Torchvision, which is not needed.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mfwrap.recipes.data.places import is_folder
from mfwrap.recipes.models.checkpoint import PROCESSOR_CONFIG
from mfwrap.recipes.models.loading import ModelError, said_by

_NUMBERS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""What is taken over from the image processor of a checkpoint."""

_CONFIGS = (PROCESSOR_CONFIG, "processor_config.json")
"""Files of a checkpoint that may have its image processor."""

_MAX = 255
"""Largest value of a pixel in an image file."""


def load_numbers(name: str, **settings: Any) -> dict[str, Any] | None:
    """Return the numbers by which the image processor of a checkpoint scales pixels.

    Args:
        name: Folder, or name on the hub.
        settings: Arguments of ``from_pretrained``.

    Returns:
        The numbers, by their names in ``preprocessor_config.json``; ``None`` if the checkpoint has
        no image processor.

    Raises:
        ModelError: If the image processor cannot be loaded.
    """
    if is_folder(name) and not any(Path(name, file).is_file() for file in _CONFIGS):
        return None
    try:
        processor = AutoImageProcessor.from_pretrained(name, **settings)
    except Exception as error:  # any library, or code of the checkpoint
        if isinstance(error, OSError) and not is_folder(name):
            return None  # the hub has none, or it cannot be reached, and the cache has none
        says = f"must have an image processor that can be loaded, got {name!r}"
        msg = f"`path` {says}: {said_by(error)}"
        raise ModelError(msg) from error
    return {key: getattr(processor, key, None) for key in _NUMBERS}


def make_image_processor(numbers: dict[str, Any] | None, image: Any, size: int | None) -> Any:
    """Return an image processor of transformers that also works without torchvision.

    Args:
        numbers: See `load_numbers`; ``None`` to scale pixels to [-1, 1].
        image: One of the images, see `pixel_values`.
        size: Width and height to which images are scaled, in three colors; ``None`` to leave them
            as they are.

    Raises:
        ModelError: If `numbers` do not fit the image.
    """
    height, width = np.shape(np.asarray(image))[:2]
    half = [0.5] * num_channels_in(image, size)
    plain: dict[str, Any] = {"do_rescale": True, "rescale_factor": 1 / _MAX, "do_normalize": True}
    plain |= {"image_mean": half, "image_std": half}
    # The class of a ViT is the plain one: others crop an image, or scale its shorter side only.
    content = {"image_processor_type": "ViTImageProcessor", **(numbers or plain)}
    content |= {"do_resize": False, "size": {"height": height, "width": width}}
    if size is not None:
        content |= {"do_resize": True, "size": {"height": size, "width": size}}
        content |= {"resample": int(PIL.Image.Resampling.BICUBIC), "do_convert_rgb": True}
    with tempfile.TemporaryDirectory(prefix="mfwrap-") as folder:
        Path(folder, PROCESSOR_CONFIG).write_text(json.dumps(content), encoding="utf-8")
        processor = AutoImageProcessor.from_pretrained(folder)
    try:
        fault = "" if pixel_values(processor, [image]).isfinite().all() else "values are not finite"
    except (TypeError, ValueError) as error:
        fault = " ".join(str(error).split())
    if fault:
        got = ", ".join(f"{key} {one}" for key, one in (numbers or plain).items())
        says = f"an image processor for images of {len(half)} channels, got {got:.300}"
        msg = f"`path` must have {says} in {PROCESSOR_CONFIG}: {fault}"
        raise ModelError(msg)
    return processor


def num_channels_in(image: Any, size: int | None) -> int:
    """Return the number of channels that the model gets of an image.

    Args:
        image: See `pixel_values`.
        size: See `make_image_processor`.
    """
    return 3 if size is not None else (*np.shape(np.asarray(image)), 1)[2]


def pixel_values(processor: Any, images: Sequence[Any]) -> torch.Tensor:
    """Return images as a batch of shape ``(N, C, H, W)`` in float32.

    Args:
        processor: See `make_image_processor`.
        images: PIL images, or arrays of shape ``(H, W)`` or ``(H, W, C)``. Arrays that are not of
            bytes have values in [0, 1], as far as the processor takes pixels from 0 to 255.
    """
    found = images if processor.do_resize else [_array(each, processor) for each in images]
    batch = processor(found, input_data_format="channels_last", return_tensors="pt")
    values: torch.Tensor = batch["pixel_values"].float()
    return values


def _array(image: Any, processor: Any) -> NDArray[Any]:
    values = np.asarray(image)
    if values.dtype != np.uint8 and processor.do_rescale:
        values = values * float(_MAX)
    return values[..., None] if values.ndim == 2 else values
