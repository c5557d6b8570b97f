"""The Hugging Face Trainer with MindFormers' training step.

`mfwrap.trainer.mixin` has all methods of the Trainer that change.
"""

from typing import TYPE_CHECKING, Any

from mfwrap.compatibility.transformers import check_trainer_release
from mfwrap.names import package_getattr

if TYPE_CHECKING:
    from mfwrap.trainer.events import BadSteps, MonitorCallback
    from mfwrap.trainer.mixin import MFTrainerMixin
    from mfwrap.trainer.rollback import Rollback
    from mfwrap.trainer.trainer import MFTrainer

__all__ = ["BadSteps", "MFTrainer", "MFTrainerMixin", "MonitorCallback", "Rollback"]

# Import the Trainer on first use. `Model` and the callbacks need only MonitorCallback; if it came
# with the Trainer, their import would be about a tenth slower.
_imported = package_getattr(
    __name__,
    {
        "BadSteps": "mfwrap.trainer.events",
        "MFTrainer": "mfwrap.trainer.trainer",
        "MFTrainerMixin": "mfwrap.trainer.mixin",
        "MonitorCallback": "mfwrap.trainer.events",
        "Rollback": "mfwrap.trainer.rollback",
    },
)


def __getattr__(name: str) -> Any:
    if name in {"MFTrainer", "MFTrainerMixin", "Rollback"}:
        check_trainer_release()
    return _imported(name)
