"""A trainer has all that its parts look at."""

from mfwrap.trainer import MFTrainer
from mfwrap.trainer.view import TrainerView, trains_shards
from support.trainer_runs import new_trainer


def test_a_trainer_has_what_its_parts_see(tmp_path):
    """Each name of the view is there once the trainer is built, in the installed transformers."""
    trainer = new_trainer(MFTrainer, tmp_path)
    names = {*TrainerView.__annotations__, *vars(TrainerView)}
    seen = {name for name in names if not name.startswith("_")}

    assert {name for name in seen if not hasattr(trainer, name)} <= {
        # The Trainer sets it when a training begins.
        "current_gradient_accumulation_steps"
    }
    assert seen >= {"args", "state", "attached", "rollbacks", "create_optimizer"}
    assert not trains_shards(trainer)
