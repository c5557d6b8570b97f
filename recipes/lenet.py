"""Train LeNet on scikit-learn's handwritten digits: MindSpore's first script, line by line.

    python -m mfwrap.recipes.lenet --epoch_size 15

The numbered comments are the steps of the script at the start of MindSpore's migration guide. The
digits come with scikit-learn and have 8 by 8 pixels; they are enlarged to LeNet's 32 by 32. Because
there are few digits, training shifts each image by up to two pixels at random.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import HfArgumentParser

from mfwrap import Model
from mfwrap.callbacks import CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor


@dataclass
class LeNetArguments:
    """Settings of the run."""

    output_dir: Path = field(
        default=Path("runs/lenet"), metadata={"help": "folder of the checkpoints"}
    )
    epoch_size: int = field(default=15, metadata={"help": "number of passes over the digits"})
    batch_size: int = field(default=16, metadata={"help": "digits per batch"})
    lr: float = field(default=0.01, metadata={"help": "initial learning rate of the cosine"})
    momentum: float = field(default=0.9, metadata={"help": "momentum of the optimizer"})
    amp_level: str = field(default="O0", metadata={"help": "O0, O1, O2, O3 or auto"})
    save_checkpoint_steps: int = field(default=400, metadata={"help": "steps between checkpoints"})
    seed: int = field(default=0, metadata={"help": "seed of weights, order and shifts"})


class LeNet(nn.Module):
    """LeNet-5 for images of one channel and 32 by 32 pixels.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores, shape ``(N, num_classes)``, for images of shape ``(N, 1, 32, 32)``."""
        features = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        features = functional.max_pool2d(functional.relu(self.conv2(features)), 2)
        features = functional.relu(self.fc1(features.flatten(1)))
        scores: Tensor = self.fc3(functional.relu(self.fc2(features)))
        return scores


class ShiftedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images that are shifted by a random number of pixels each time they are read.

    Args:
        images: Images of shape ``(N, C, H, W)``. Their smallest value fills the free margin.
        labels: Labels of shape ``(N,)``.
        pixels: Largest shift in each direction, in pixels.
    """

    def __init__(self, images: Tensor, labels: Tensor, pixels: int = 2) -> None:
        margins = (pixels, pixels, pixels, pixels)
        self._padded = functional.pad(images, margins, value=float(images.min()))
        self._labels = labels
        self._size = images.shape[-2:]
        self._places = 2 * pixels + 1

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image of shape ``(C, H, W)`` and its label."""
        height, width = self._size
        top, left = torch.randint(0, self._places, (2,)).tolist()
        image = self._padded[index, :, top : top + height, left : left + width]
        return image, self._labels[index]


def create_dataset(
    batch_size: int, seed: int
) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Return a loader of training images and a loader of held-out images, a fifth of all digits."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images.astype(np.float32) / 16)[:, None]
    images = functional.interpolate(pixels, size=(32, 32), mode="bilinear")
    labels = torch.from_numpy(digits.target).long()
    training, held_out = train_test_split(
        torch.arange(len(images)), test_size=0.2, random_state=seed, stratify=digits.target
    )
    mean, deviation = images[training].mean(), images[training].std()
    images = (images - mean) / deviation
    shuffled = DataLoader(
        ShiftedImages(images[training], labels[training]),
        batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(seed),
    )
    return shuffled, DataLoader(TensorDataset(images[held_out], labels[held_out]), batch_size)


def main() -> None:
    """Train, save checkpoints, and print the accuracy on held-out digits."""
    # mypy rejects any dataclass here: HfArgumentParser declares its argument as a `NewType`.
    parser = HfArgumentParser(LeNetArguments)  # type: ignore[arg-type]  # (see above)
    (config,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(config.seed)
    # 1. Define the data set.
    ds_train, ds_eval = create_dataset(config.batch_size, config.seed)
    # 2. Define the forward network.
    network = LeNet(num_classes=10)
    # 3. Define the loss.
    net_loss = nn.CrossEntropyLoss()
    # 4. Define the optimizer.
    net_opt = torch.optim.SGD(network.parameters(), config.lr, momentum=config.momentum, fused=True)
    schedule = CosineAnnealingLR(net_opt, T_max=config.epoch_size * len(ds_train))
    # Define the callbacks.
    config_ck = CheckpointConfig(config.save_checkpoint_steps)
    ckpt_cb = ModelCheckpoint("lenet", config.output_dir, config_ck)
    loss_cb = LossMonitor(per_print_times=len(ds_train))
    # Define the model.
    model = Model(
        network,
        net_loss,
        net_opt,
        metrics={"Accuracy": "accuracy"},
        amp_level=config.amp_level,
        lr_scheduler=schedule,
    )
    # 5-7. Train.
    model.train(config.epoch_size, ds_train, callbacks=[loss_cb, ckpt_cb, TimeMonitor()])
    print(f"accuracy on held-out digits: {model.eval(ds_eval)['Accuracy']:.4f}")
    print(f"checkpoint: {ckpt_cb.latest_ckpt_file_name}")


if __name__ == "__main__":
    main()
