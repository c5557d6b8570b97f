"""The table of update cells has every cell by its name."""

from mfwrap import loss_scale
from mfwrap.loss_scale.names import UPDATE_CELLS


def test_the_table_has_every_public_cell():
    """Each public subclass of the base class is in the table under its own name."""
    public = {name: getattr(loss_scale, name) for name in loss_scale.__all__}
    cells = {
        name: kind
        for name, kind in public.items()
        if isinstance(kind, type) and kind is not loss_scale.LossScaleUpdateCell
    }

    assert dict(UPDATE_CELLS) == cells
