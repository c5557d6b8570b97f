"""Train LeNet on scikit-learn's handwritten digits: MindSpore's first script, line by line.

    python -m mfwrap.recipes.lenet --epoch_size 20

Each numbered comment is one of the script that MindSpore's migration guide begins with. The digits
are 8 by 8 pixels and part of scikit-learn; they are enlarged to LeNet's 32 by 32.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import HfArgumentParser

from mfwrap import Model
from mfwrap.callbacks import CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor


@dataclass
class LeNetArguments:
    """Settings of the run."""

    output_dir: Path = field(default=Path("runs/lenet"), metadata={"help": "checkpoints"})
    epoch_size: int = field(default=20, metadata={"help": "passes over the digits"})
    batch_size: int = field(default=16, metadata={"help": "digits in a batch"})
    lr: float = field(default=0.01, metadata={"help": "learning rate"})
    momentum: float = field(default=0.9, metadata={"help": "momentum of the optimizer"})
    amp_level: str = field(default="O0", metadata={"help": "O0, O1, O2, O3 or auto"})
    save_checkpoint_steps: int = field(default=400, metadata={"help": "steps between two saves"})
    seed: int = field(default=0, metadata={"help": "seed of weights and order"})


class LeNet(nn.Module):
    """LeNet-5 for one channel of 32 by 32 pixels.

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
        """Return scores of shape ``(N, num_classes)`` of images of shape ``(N, 1, 32, 32)``."""
        features = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        features = functional.max_pool2d(functional.relu(self.conv2(features)), 2)
        features = functional.relu(self.fc1(features.flatten(1)))
        scores: Tensor = self.fc3(functional.relu(self.fc2(features)))
        return scores


def create_dataset(
    batch_size: int, seed: int
) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Return batches of images and labels to train with, and a fifth of all digits to evaluate."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images.astype(np.float32) / 16)[:, None]
    images = functional.interpolate(pixels, size=(32, 32), mode="bilinear")
    training, held_out = train_test_split(
        np.arange(len(images)), test_size=0.2, random_state=seed, stratify=digits.target
    )
    dataset = TensorDataset(images, torch.from_numpy(digits.target).long())
    generator = torch.Generator().manual_seed(seed)
    shuffled = DataLoader(
        torch.utils.data.Subset(dataset, training.tolist()),
        batch_size,
        shuffle=True,
        drop_last=True,
        generator=generator,
    )
    return shuffled, DataLoader(torch.utils.data.Subset(dataset, held_out.tolist()), batch_size)


def main() -> None:
    """Train and evaluate."""
    # The parser's own name for the type of a dataclass is one that no dataclass has.
    parser = HfArgumentParser(LeNetArguments)  # type: ignore[arg-type]
    (config,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(config.seed)
    # 1. define dataset object
    ds_train, ds_eval = create_dataset(config.batch_size, config.seed)
    # 2. define forward network
    network = LeNet(num_classes=10)
    # 3. define loss
    net_loss = nn.CrossEntropyLoss()
    # 4. define optimizer
    net_opt = torch.optim.SGD(network.parameters(), config.lr, momentum=config.momentum, fused=True)
    # define callbacks
    config_ck = CheckpointConfig(config.save_checkpoint_steps)
    ckpt_cb = ModelCheckpoint("lenet", config.output_dir, config_ck)
    loss_cb = LossMonitor(per_print_times=len(ds_train))
    # define model
    model = Model(
        network, net_loss, net_opt, metrics={"Accuracy": "accuracy"}, amp_level=config.amp_level
    )
    # 5-7. start training
    model.train(config.epoch_size, ds_train, callbacks=[loss_cb, ckpt_cb, TimeMonitor()])
    print(f"accuracy on held-out digits: {model.eval(ds_eval)['Accuracy']:.4f}")
    print(f"checkpoint: {ckpt_cb.latest_ckpt_file_name}")


if __name__ == "__main__":
    main()
