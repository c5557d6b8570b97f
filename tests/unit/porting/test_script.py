"""Names and attributes are found in scripts, and nothing is taken for what it is not."""

import ast
import textwrap

import pytest

from mfwrap.porting.modules import Imported
from mfwrap.porting.script import Script


def uses(source, others=None):
    """Return the uses in a script as pairs of a line and a name."""
    found = Script(ast.parse(textwrap.dedent(source)), others or {}).uses
    return [
        (use.line, subject.shown if isinstance(subject := use.subject, Imported) else name_of(use))
        for use in found
    ]


def name_of(use):
    """Return the kind and the name of an attribute."""
    mark = "" if use.subject.is_sure else "?"
    return f"{use.subject.kind}{mark}: {use.subject.name}"


def attributes(source, others=None):
    """Return the attributes in a script, with their kinds, in the order of their lines."""
    return [name for _, name in sorted(uses(source, others)) if ": " in name]


@pytest.mark.parametrize(
    ("imports", "used", "shown"),
    [
        ("import mindspore", "mindspore.nn.Dense(1, 2)", "nn.Dense"),
        ("import mindspore as ms", "ms.nn.Dense(1, 2)", "nn.Dense"),
        ("import mindspore as ms", "ms.ops.operations.MatMul()", "ops.MatMul"),
        ("import mindspore.nn as nn", "nn.Dense(1, 2)", "nn.Dense"),
        ("from mindspore import nn", "nn.Dense(1, 2)", "nn.Dense"),
        ("from mindspore import nn as layers", "layers.Dense(1, 2)", "nn.Dense"),
        ("from mindspore.nn import Dense", "Dense(1, 2)", "nn.Dense"),
        ("from mindspore.nn import Dense as D", "D(1, 2)", "nn.Dense"),
        ("from mindspore.ops import composite as C", "C.HyperMap()", "ops.HyperMap"),
        ("from mindspore.ops import functional as F", "F.depend(1, 2)", "ops.depend"),
        ("import mindspore.ops.operations as P", "P.AllReduce()", "ops.AllReduce"),
        ("import mindspore.common.dtype as t", "t.float32", "mindspore.common.dtype.float32"),
        ("from mindspore import context", "context.ParallelMode.DATA_PARALLEL",
         "mindspore.context.ParallelMode"),
        ("from mindformers import MFTrainOneStepCell as Cell", "Cell(1)",
         "mindformers.MFTrainOneStepCell"),
    ],
)  # fmt: skip
def test_aliases_are_followed(imports, used, shown):
    """A use is found through every form of import, also in a function above it."""
    source = f"def f():\n    return {used}\n{imports}\n"

    assert (2, shown) in uses(source)


@pytest.mark.parametrize(
    "imports",
    [
        "try:\n    import mindspore.nn as nn\nexcept ImportError:\n    nn = None",
        "try:\n    import torch.nn as nn\nexcept ImportError:\n    from mindspore import nn",
        "if USE:\n    from mindspore import nn\nelse:\n    from torch import nn",
        "if USE:\n    from torch import nn\nelse:\n    from mindspore import nn",
        "if A:\n    from torch import nn\nelif B:\n    from mindspore import nn\nelse:\n    nn = 0",
        "from mindspore import nn\nif USE:\n    nn = None",
    ],
)
@pytest.mark.parametrize("use", ["nn.Dense", "def f(): nn.Dense"])
def test_branches_that_disagree(imports, use):
    """After branches that bind a name differently, it is MindSpore's."""
    last = imports.count("\n") + 2

    assert (last, "nn.Dense") in uses(f"{imports}\n{use}\n")
    assert (1, "nn.Dense") in uses(f"def f(): nn.Dense\n{imports}\n")


def test_uses_in_a_branch_of_another_library():
    """In its own branch, a name is what the branch imports."""
    source = """
    if USE:
        from mindspore import nn
        nn.Dense
    else:
        from torch import nn
        nn.Linear
    try:
        x = 1
    finally:
        nn.Cell
    """

    assert [name for _, name in uses(source)] == ["mindspore.nn", "nn.Dense", "nn.Cell"]


def test_other_objects_of_the_same_name():
    """A parameter, a variable or an attribute of something else is not MindSpore's name."""
    source = """
    from mindspore import nn, ops
    import numpy as np
    def f(nn, x):
        ops = np.random
        return nn.Dense, ops.depend, x.nn.Dense, [Tensor for Tensor in x]
    """

    assert [name for line, name in uses(source) if line > 3] == []


def test_a_script_without_mindspore():
    """Attributes with MindSpore's names mean nothing in a script that does not import it."""
    source = "def f(cb_params, optimizer):\n    return cb_params.x, optimizer.global_step\n"

    assert uses(source) == []


CELL = """
import mindspore.nn as nn
class Base(nn.TrainOneStepWithLossScaleCell):
    def __init__(self, network, optimizer, scale):
        super().__init__(network, optimizer, scale)
        self.mine = 1
class Step(Base):
    def construct(self, *inputs):
        loss = self.network(*inputs)
        status, sens = self.start_overflow_check(loss, self.scale_sense)
        self.own()
        self.mine += self.unheard_of
        self.optimizer(self.grad_reducer(loss))
        return self.optimizer.global_step
    def own(self):
        self.scale_sense = 2
"""


def test_attributes_of_a_step():
    """Inherited attributes of a training cell are found; those of the user's classes are not."""
    assert sorted(set(attributes(CELL))) == [
        "optimizer: __call__",
        "optimizer: global_step",
        "training cell: construct",
        "training cell: grad_reducer",
        "training cell: network",
        "training cell: optimizer",
        "training cell: scale_sense =",
        "training cell: start_overflow_check",
        "training cell: unheard_of",
    ]


def test_a_base_class_that_is_not_known():
    """If a base class is unknown, so may be an attribute: it is not reported."""
    source = CELL.replace("(nn.TrainOneStepWithLossScaleCell)", "(nn.TrainOneStepCell, Mixin)")

    assert "training cell: unheard_of" not in attributes(source)
    assert "training cell: start_overflow_check" in attributes(source)


def test_a_class_of_another_script():
    """A class of another script is known under the name with which it is imported."""
    others = Script(ast.parse(CELL), {}).classes
    source = """
    import mindspore
    from .step import Base as Mine
    class Other(Mine):
        def construct(self, x):
            return self.grad(x), self.mine
    """

    assert attributes(source, others) == ["training cell: construct", "training cell: grad"]
    assert attributes(source) == []


def test_attributes_of_callbacks():
    """What comes from a run context is followed through variables and attributes."""
    source = """
    from mindspore.train.callback import Callback
    class Mine(Callback):
        def step_end(self, context):
            params = context.original_args()
            params.cur_step_num, params.get("metrics"), params["epoch_num"], params.nonsense
            params.own_fact = params.own_fact
            optimizer = params.optimizer
            optimizer.global_step
            params.train_network.network.optimizer.get_lr()
            context.request_stop()
        def helper(self, cb_params):
            cb_params.batch_num
            cb_params.own_of_an_imitation
    """

    assert sorted(attributes(source)) == sorted([
        *("run_context: original_args", "run_context: request_stop"),
        *("cb_params: cur_step_num", "cb_params: metrics", "cb_params: epoch_num"),
        *("cb_params: nonsense", "cb_params: optimizer", "optimizer: global_step"),
        *("cb_params: train_network", "training cell: network", "network: optimizer"),
        *("optimizer: get_lr", "cb_params: batch_num"),
    ])  # fmt: skip


def test_an_optimizer_by_its_name():
    """An object that is only named like an optimizer is marked; one of torch is none."""
    source = """
    import mindspore, torch
    from mindspore import nn
    def f(optimizer, config):
        optimizer.global_step, config.optimizer.learning_rate, optimizer.nonsense
    def g():
        optimizer = torch.optim.SGD()
        optimizer.global_step
    def h(net):
        own = nn.Momentum(net)
        own.global_step
    """

    assert attributes(source) == ["optimizer?: global_step", "optimizer: global_step"]


def test_an_optimizer_of_ones_own():
    """`self` of an optimizer's class is told apart from an optimizer that somebody uses."""
    source = """
    from mindspore import nn
    class Mine(nn.Optimizer):
        def __init__(self, params, learning_rate):
            super().__init__(learning_rate, params)
            self.moments = self.parameters.clone("m", "zeros")
        def construct(self, gradients):
            gradients = self.decay_weight(gradients)
            return self.global_step, self.moments
    def f(net):
        return Mine(net, 0.1).global_step
    """

    assert sorted(attributes(source)) == [
        "optimizer class: construct",
        "optimizer class: decay_weight",
        "optimizer class: global_step",
        "optimizer class: parameters",
        "optimizer: global_step",
    ]


def test_the_loss_scale_of_an_optimizer():
    """The argument is reported: torch's optimizers do not divide their gradients by it."""
    source = """
    from mindspore import nn
    import torch
    def f(net, own):
        nn.Adam(net, loss_scale=1024.0), nn.Momentum(net, 0.1, 0.9, 1e-4, 1024.0)
        nn.Momentum(net, 0.1, 0.9, 1e-4), torch.optim.Adam(net, loss_scale=1), own(loss_scale=1)
    """

    assert attributes(source) == ["optimizer: loss_scale="] * 2


def test_the_loss_scale_is_a_tensor():
    """The loss scale is followed through the overflow check, as public wrappers use it."""
    source = """
    from mindspore import nn
    class Step(nn.TrainOneStepWithLossScaleCell):
        def construct(self, x):
            loss = self.network(x)
            status, scale = self.start_overflow_check(loss, self.scale_sense)
            status.value()
            return scale.astype(loss.dtype), scale.value()
    """

    assert [one for one in attributes(source) if one.startswith("tensor")] == [
        *("tensor: astype", "tensor: value"),
    ]


def test_a_schedule_of_ones_own():
    """A schedule is no network: torch calls it with the step."""
    source = """
    from mindspore.nn.learning_rate_schedule import LearningRateSchedule
    class Mine(LearningRateSchedule):
        def construct(self, global_step):
            return 0.1
    """

    assert attributes(source) == ["learning-rate schedule: construct"]


def test_methods_that_only_mindspore_has():
    """A method that only MindSpore has is found on any object, except a class with its own."""
    source = """
    from mindspore import nn
    def f(net, loss):
        net.set_train(), loss.asnumpy(), net.own()
    class Net(nn.Cell):
        def set_train(self):
            self.trainable_params()
        def construct(self, x):
            self.set_train()
    """

    assert sorted(attributes(source)) == [
        *("network: construct", "network: set_train", "network: trainable_params"),
        "tensor: asnumpy",
    ]


def test_data_sets():
    """The methods of a data set return data sets."""
    source = """
    import mindspore.dataset as ds
    def f(rows):
        data = ds.GeneratorDataset(rows, ["x"]).map(rows)
        data = data.batch(4)
        return data.repeat(2), rows.map(3)
    """

    assert attributes(source) == ["data set: map", "data set: batch", "data set: repeat"]


def test_a_long_chain_of_calls():
    """The time grows with the length of a chain: 2**60 steps would never end."""
    chain = "rows" + ".map(f)" * 60

    assert attributes(f"import mindspore.dataset as ds\nrows = ds.X()\n{chain}\n") == []
    assert len(attributes(f"from mindspore import dataset as ds\nds.ADataset(){chain[4:]}")) == 60


def test_pynative_callbacks():
    """Events, arguments and keywords of the PyNative trainer's callbacks are found."""
    source = """
    from mindformers.pynative.callback import TrainerCallback
    class Mine(TrainerCallback):
        def on_step_end(self, args, state, lr_scheduler=None, **kwargs):
            kwargs["loss"], kwargs.get("grad_norm"), state.epoch_step, args.training.steps
    """

    assert sorted(attributes(source)) == sorted([
        *("PyNative event: on_step_end", "PyNative argument: lr_scheduler"),
        *("PyNative argument: loss", "PyNative argument: grad_norm"),
        *("PyNative state: epoch_step", "PyNative settings: training"),
    ])  # fmt: skip


def test_uses_are_reported_once():
    """Imports are read before everything else, but reported once."""
    assert uses("from mindspore import Tensor\nTensor(1)\n") == [
        (1, "mindspore.Tensor"),
        (2, "mindspore.Tensor"),
    ]
