"""A training on several ranks of a model of which a layer takes no part in the loss."""

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW

from mfwrap.accelerate import attach
from support.small_networks import Classifier, labelled_batches


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = Classifier()
        self.pooler = nn.Linear(4, 4)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.query(inputs, labels)
        return loss


def main() -> None:
    """Train two updates; the layer `pooler` gets no gradient."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    towers = _Towers()
    model, optimizer = accelerator.prepare(towers, AdamW(towers.parameters()))
    for inputs, labels in labelled_batches(2):
        accelerator.backward(model(inputs, labels))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
