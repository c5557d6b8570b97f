"""`hidden_matrices` returns the weights that Muon is meant for."""

from torch import nn

from mfwrap.optimizers import hidden_matrices


class WithHead(nn.Module):
    """A model with embeddings, matrices and a head, like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.head = nn.Linear(4, 9)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that computes logits."""
        return self.head


def test_embeddings_biases_and_frozen_weights_are_left_out():
    """Only trainable matrices between the embeddings are returned, also inside a wrapper."""
    network = WithHead()
    wrapped = nn.Sequential(network)

    assert list(hidden_matrices(network)) == ["hidden.weight"]
    assert list(hidden_matrices(wrapped)) == ["0.hidden.weight"]


def test_a_network_without_a_head():
    """All matrices of an ordinary network are returned; a layer returned as None does not count."""
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    network.get_output_embeddings = lambda: None

    assert list(hidden_matrices(network)) == ["0.weight", "1.weight"]
