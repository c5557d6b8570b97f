"""Rows with the same text for several names."""

from mfwrap.names.texts import Without, each


def test_names_with_another_name_in_torch():
    """A name after the equals sign is torch's."""
    rows = each("ReLU HSwish=Hardswish", "`torch.nn.{}`")

    assert rows == {"ReLU": "`torch.nn.ReLU`", "HSwish": "`torch.nn.Hardswish`"}


def test_a_reason_stays_a_reason():
    """A reason why nothing replaces a name is kept as it is, with its type."""
    rows = each("Lamb LARS", Without("torch has {none}"))

    assert rows == {"Lamb": "torch has {none}", "LARS": "torch has {none}"}
    assert all(isinstance(text, Without) for text in rows.values())
