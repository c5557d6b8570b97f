"""MindSpore's and MindFormers' modules: what is imported from where, and its area in the table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

LIBRARIES = ("mindspore", "mindformers")
"""Packages whose names are looked up."""

_AREAS: Mapping[str, str] = MappingProxyType(
    {
        "mindformers": "mindformers",
        "mindspore": "mindspore",
        "mindspore.boost": "mindspore.boost",
        "mindspore.common.initializer": "initializer",
        "mindspore.communication": "communication",
        "mindspore.dataset": "dataset",
        "mindspore.dataset.audio": "mindspore.dataset.audio",
        "mindspore.dataset.text": "mindspore.dataset.text",
        "mindspore.dataset.transforms": "transforms",
        "mindspore.dataset.vision": "transforms",
        "mindspore.experimental": "experimental",
        "mindspore.log": "log",
        "mindspore.mindrecord": "mindspore.mindrecord",
        "mindspore.mint": "mint",
        "mindspore.nn": "nn",
        "mindspore.nn.probability": "mindspore.nn.probability",
        "mindspore.nn.transformer": "mindspore.nn.transformer",
        "mindspore.numpy": "mindspore.numpy",
        "mindspore.ops": "ops",
        "mindspore.scipy": "mindspore.scipy",
    }
)
"""Area of the names of a module and of the modules below it."""

_SUBMODULES: Mapping[str, str] = MappingProxyType(
    {
        "mindformers": "checkpoint core dataset generation inference models modules parallel_core "
        "pet pynative tools trainer utils wrapper",
        "mindformers.core": "callback clip_grad context loss lr metric optim",
        "mindspore": "amp boost common communication context dataset dtype experimental hal log "
        "mindrecord mint nn numpy ops parallel profiler rewrite runtime scipy train",
        "mindspore.common": "api dtype initializer parameter seed tensor",
        "mindspore.communication": "comm_func management",
        "mindspore.dataset": "audio engine text transforms vision",
        "mindspore.dataset.text": "transforms utils",
        "mindspore.dataset.transforms": "c_transforms py_transforms transforms vision",
        "mindspore.dataset.transforms.vision": "c_transforms py_transforms",
        "mindspore.dataset.vision": "c_transforms py_transforms transforms utils",
        "mindspore.experimental": "optim",
        "mindspore.experimental.optim": "lr_scheduler",
        "mindspore.mint": "distributed linalg nn optim special",
        "mindspore.mint.nn": "functional",
        "mindspore.nn": "cell dynamic_lr grad layer learning_rate_schedule loss metrics optim "
        "probability transformer wrap",
        "mindspore.nn.wrap": "cell_wrapper grad_reducer loss_scale",
        "mindspore.ops": "auto_generate composite function functional operations primitive",
        "mindspore.train": "amp callback data_sink dataset_helper loss_scale_manager metrics model "
        "serialization summary",
    }
)
MODULES = frozenset(
    {
        *LIBRARIES,
        *(f"{parent}.{one}" for parent in _SUBMODULES for one in _SUBMODULES[parent].split()),
    }
)
"""Modules that are reached as attributes of others. All other names are functions and classes."""


class Imported(NamedTuple):
    """What a name in a script stands for: a module, or a name of a module."""

    module: str
    """Full name of the module."""

    name: str | None = None
    """Name in the module; None for the module itself."""

    def attribute(self, name: str) -> Self:
        """Return what an attribute of the module stands for."""
        path = f"{self.module}.{name}"
        return type(self)(path) if path in MODULES else type(self)(self.module, name)

    @property
    def is_known(self) -> bool:
        """Whether the module is one of MindSpore or MindFormers."""
        return self.module.partition(".")[0] in LIBRARIES

    @property
    def area(self) -> str:
        """Area of the module's names in the table."""
        module = self.module
        while module not in _AREAS:
            module = module.rpartition(".")[0]
        return _AREAS[module]

    @property
    def shown(self) -> str:
        """The name as it is shown: ``nn.Dense``, ``mindspore.amp.all_finite``."""
        if self.name is None:
            return self.module
        is_short = self.area in {"dataset", "nn", "ops", "transforms"}
        return f"{self.area if is_short else self.module}.{self.name}"
