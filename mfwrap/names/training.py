"""Names of MindSpore and MindFormers that belong to a training, and what to write for each.

The keys of `ROWS` are areas: a package of MindSpore or MindFormers with all modules below it.
`mfwrap.names.counterparts` looks names up, and describes the texts.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mfwrap.names.texts import Without, each

_ACCUMULATION = "`MFTrainOneStepCell(..., gradient_accumulation_steps=micro_size)`"
_PIPELINE = (
    f"{_ACCUMULATION}, which runs the micro-batches one after the other; for stages on several "
    "devices pass a schedule of `torch.distributed.pipelining` to the cell"
)
_TWO_OUTPUTS = "`calculate_per_token_loss=True` for a network that returns two outputs"
_LAUNCH = "`accelerate launch` in front of the script"
_DEVICE = (
    "`Accelerator(cpu=True)` before anything else to stay on the CPU; accelerate finds other "
    "devices by itself"
)
_EAGER = "nothing, or `torch.compile` around the network"
_METRICS = "of `mfwrap.Model`, or a metric of `torchmetrics`"
_LOOP = "a loop over a `torch.utils.data.DataLoader`"
_FORMULA = "`torch.optim.lr_scheduler.LambdaLR` with the formula"
_IN_SCHEDULE = " in a schedule of your own"
_RECIPE = "a recipe that `mfwrap train` runs; `mfwrap import-mindformers` converts a YAML file"
_SIGTERM = (
    "`mfwrap.trainer.MFTrainer`, which saves a checkpoint on SIGTERM, or "
    "`mfwrap.callbacks.ModelCheckpoint` with `CheckpointConfig(exception_save=True)`"
)
_TENSORBOARD = "`mfwrap.callbacks.MFLossMonitor`, which writes to TensorBoard"
_RESUME = (
    '`mfwrap.trainer.MFTrainer` and its `train(resume_from_checkpoint="auto")`, started again by '
    "`torchrun --max-restarts`"
)
_REPLICAS = "`mfwrap.callbacks.ReplicaCheck`, which compares ranks that must have equal weights"
_RECOMPUTE = "`mfwrap.callbacks.RecomputeCheck`, which runs a step again and compares the results"
_EXPERTS = "your own `mfwrap.callbacks.Callback`"
_EXPORT = Without("a network of PyTorch is exported by `torch.export` or `torch.onnx`")
_STRATEGY = Without("MindSpore's parallel strategies exist in MindSpore alone; see docs/ranks.md")
_SCALER = "`mfwrap.DynamicLossScaler`, `mfwrap.StaticLossScaler` and `mfwrap.all_finite`"

_DTYPES = (
    "bfloat16 complex64 complex128 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 "
    "uint32 uint64"
)

_MINDSPORE: Mapping[str, str] = {
    "Accuracy": f"`metrics={{'accuracy'}}` {_METRICS}",
    "COOTensor": "`torch.sparse_coo_tensor`",
    "CSRTensor": "`torch.sparse_csr_tensor`",
    "ConvertModelUtils": Without("mfwrap and torch have no optimizer THOR"),
    "ConvertNetUtils": Without("mfwrap and torch have no optimizer THOR"),
    "DatasetHelper": _LOOP,
    "F1": f"`metrics={{'F1'}}` {_METRICS}",
    "GRAPH_MODE": _EAGER,
    "JitConfig": _EAGER,
    "Loss": f"`metrics={{'loss'}}` {_METRICS}",
    "MAE": f"`metrics={{'mae'}}` {_METRICS}",
    "MSE": f"`metrics={{'mse'}}` {_METRICS}",
    "Metric": "a metric of `torchmetrics`, or a class with its methods `update`, `compute` and "
    "`reset`, in `metrics` of `mfwrap.Model`",
    "PYNATIVE_MODE": "nothing: torch runs eagerly by default",
    "ParallelMode": f"{_LAUNCH}, which makes `mfwrap.Model` data-parallel",
    "Parameter": "`torch.nn.Parameter`, or a plain tensor for what is not trained",
    "ParameterTuple": "`tuple(network.parameters())`; for its `clone`, "
    "`tuple(torch.zeros_like(p) for p in parameters)` or `p.detach().clone()`",
    "Perplexity": "`torchmetrics.text.Perplexity`, in `metrics` of `mfwrap.Model`",
    "Precision": f"`metrics={{'precision'}}` {_METRICS}",
    "Profiler": "`mfwrap.callbacks.ProfileMonitor`, or `torch.profiler.profile`",
    "Recall": f"`metrics={{'recall'}}` {_METRICS}",
    "RowTensor": "nothing: dense gradients of torch need no case of their own",
    "RowTensorInner": "nothing: dense gradients of torch need no case of their own",
    "SparseTensor": "`torch.sparse_coo_tensor`",
    "SummaryRecord": "`torch.utils.tensorboard.SummaryWriter`, or "
    "`mfwrap.callbacks.MFLossMonitor`, which writes to TensorBoard",
    "Tensor": "`torch.tensor`, and `torch.Tensor` as a type",
    "Top1CategoricalAccuracy": f"`metrics={{'top_1_accuracy'}}` {_METRICS}",
    "Top5CategoricalAccuracy": f"`metrics={{'top_5_accuracy'}}` {_METRICS}",
    "_InternalCallbackParam": "`mfwrap.model.CallbackParameters`",
    "__version__": "`torch.__version__`",
    "amp": f"{_SCALER}, or `torch.amp`",
    "auto_mixed_precision": "`mfwrap.Model(..., amp_level=...)`, or `torch.autocast`",
    "bool_": "`torch.bool`",
    "build_train_network": "`mfwrap.Model`, and its `train_network`",
    "connect_network_with_dataset": _LOOP,
    "constexpr": "nothing: a plain Python function",
    "data_sink": _LOOP,
    "export": _EXPORT,
    "float_": "`torch.float32`",
    "from_numpy": "`torch.from_numpy`",
    "get_auto_parallel_context": "`accelerate.PartialState()`, whose `num_processes` and "
    "`process_index` are the number of ranks and this rank; `gradients_mean` is True, and "
    "`pipeline_stages` 1 without a schedule of `torch.distributed.pipelining`",
    "get_context": "`accelerate.PartialState().device`, whose `type` is `cpu` or `cuda`",
    "get_grad": "`dict(gradients)[identifier]`: with `return_ids` each gradient comes with its id",
    "get_seed": "`torch.initial_seed`",
    "int_": "`torch.int64`",
    "jacfwd": "`torch.func.jacfwd`",
    "jacrev": "`torch.func.jacrev`",
    "jit": _EAGER,
    "jit_class": "nothing: a plain Python class",
    "jvp": "`torch.func.jvp`",
    "load_checkpoint": "`torch.load` with `weights_only`",
    "load_distributed_checkpoint": "`torch.distributed.checkpoint.load`",
    "load_param_into_net": "`network.load_state_dict(...)`",
    "ms_class": "nothing: a plain Python class",
    "ms_function": _EAGER,
    "mutable": "nothing: the values themselves, because nothing is compiled into constants",
    "nn": "`torch.nn`; MindSpore's training cells are names of `mfwrap` itself, such as "
    "`mfwrap.TrainOneStepWithLossScaleCell`",
    "ops": "`torch`, which has these functions itself",
    "reset_auto_parallel_context": f"nothing: {_LAUNCH} decides",
    "run_check": "nothing: `import torch` is the check",
    "save_checkpoint": "`torch.save`, or `mfwrap.callbacks.ModelCheckpoint`",
    "set_algo_parameters": _STRATEGY,
    "set_auto_parallel_context": _LAUNCH,
    "set_context": _DEVICE,
    "current_stream": "`torch.accelerator.current_stream`",
    "synchronize": "`torch.accelerator.synchronize`",
    **each("profile schedule tensorboard_trace_handler", "`torch.profiler.{}`"),
    "set_recursion_limit": "nothing: it is for MindSpore's compiler",
    "version": "`torch.__version__`",
    "set_deterministic": "`torch.use_deterministic_algorithms`",
    "set_device": _DEVICE,
    "set_seed": "`accelerate.utils.set_seed`",
    "tensor": "`torch.tensor`",
    "vjp": "`torch.func.vjp`",
    "vmap": "`torch.func.vmap`",
    # Not public, but in many scripts.
    "_get_device_num": "`accelerate.PartialState().num_processes`",
    "_get_enable_parallel_optimizer": "`False`: `torch.distributed.fsdp` divides an optimizer",
    "_get_gradients_mean": "`True`: gradients are averaged over the ranks",
    "_get_pipeline_stages": "`1` without a schedule of `torch.distributed.pipelining`",
    "_get_parallel_mode": "`accelerate.PartialState().distributed_type`",
    **each(
        "INC_BOTH INC_LEFT INC_NEITHER INC_RIGHT Rel Validator check_bool check_float_range "
        "check_int_range check_is_float check_non_negative_float check_non_negative_int "
        "check_positive_float check_positive_int check_value_type",
        "nothing: an `if` that raises an error checks an argument",
    ),
    "_handle_loss": "`net_outputs[0]`, or `net_outputs` itself if it is a tensor",
    **each(_DTYPES, "`torch.{}`"),
    **each("convert_model export_split_mindir load save_mindir", _EXPORT),
    **each(
        "build_searched_strategy merge_sliced_parameter rank_list_for_transform "
        "restore_group_info_list transform_checkpoints",
        _STRATEGY,
    ),
}

_NN: Mapping[str, str] = {
    "Cell": "`torch.nn.Module`, and `forward` for `construct`; `mfwrap.TrainOneStepCell`, and "
    "`__call__`, for a cell that calls an optimizer and is trained by `Model`",
    "CellDict": "`torch.nn.ModuleDict`",
    "CellList": "`torch.nn.ModuleList`",
    "DistributedGradReducer": "`torch.nn.parallel.DistributedDataParallel`, which averages "
    "gradients in backward, or `grad_reducer` of a training cell for those of `mfwrap.grad`",
    "ForwardValueAndGrad": "`mfwrap.value_and_grad(network, None, network.parameters())`",
    "GetNextSingleOp": _LOOP,
    "GradAccumulationCell": _ACCUMULATION,
    "GraphCell": _EXPORT,
    "_Loss": "`torch.nn.Module`, and `forward` for `construct`",
    "LossBase": "`torch.nn.Module`, and `forward` for `construct`",
    "MicroBatchInterleaved": _ACCUMULATION,
    "ParameterUpdate": "`parameter.copy_(value)` within `torch.no_grad()`",
    "PipelineCell": _PIPELINE,
    "PipelineGradReducer": "a schedule of `torch.distributed.pipelining`, passed to the cell",
    "SequentialCell": "`torch.nn.Sequential`",
    "TimeDistributed": Without("torch has no such layer; reshape time into the batch"),
    "WithEvalCell": "`with torch.no_grad():` around the network and its loss function",
    "WithGradCell": "`mfwrap.GradOperation`",
    # Optimizers
    "opt_init_args_register": "nothing: `torch.optim.Optimizer` keeps its arguments itself",
    "AdaFactor": "`torch.optim.Adafactor`, whose arguments differ",
    "AdaMax": "`torch.optim.Adamax`",
    "AdamOffload": "`torch.optim.AdamW`, or offloading by accelerate",
    "LazyAdam": "`torch.optim.SparseAdam` for sparse gradients",
    "Momentum": "`torch.optim.SGD`, which has an argument `momentum`",
    "Optimizer": "`torch.optim.Optimizer`, whose `__init__` takes the parameters and a dict of "
    "defaults such as `lr`, and `step` for `construct`",
    "RMSProp": "`torch.optim.RMSprop`, whose `alpha` is `decay`; by default, torch has `lr` 0.01, "
    "`alpha` 0.99 and `eps` 1e-08, and MindSpore 0.1, 0.9 and 1e-10, which it adds within the root",
    **each(
        "FTRL LARS Lamb ProximalAdagrad thor", Without("torch and mfwrap have no such optimizer")
    ),
    # Schedules
    "CosineDecayLR": "`mfwrap.schedules.CosineWithWarmUpLR(optimizer, warmup_steps=0, "
    "total_steps=decay_steps, lr_end=min_lr)`, or"
    f"{_IN_SCHEDULE} `min_lr + (max_lr - min_lr) * (1 + cos(pi * min(step / decay_steps, 1))) / 2`",
    "ExponentialDecayLR": "`torch.optim.lr_scheduler.ExponentialLR` with "
    f"`gamma=decay_rate ** (1 / decay_steps)`, or{_IN_SCHEDULE} "
    "`learning_rate * decay_rate ** (step / decay_steps)`",
    "InverseDecayLR": _FORMULA,
    "LearningRateSchedule": "`torch.optim.lr_scheduler.LambdaLR` with a class whose `__call__` "
    "takes the step and returns the rate divided by the optimizer's `lr`; pass it to the cell as "
    "`lr_scheduler`",
    "NaturalExpDecayLR": _FORMULA,
    "PolynomialDecayLR": f"`mfwrap.schedules.PolynomialWithWarmUpLR`, or{_IN_SCHEDULE} "
    "`end + (learning_rate - end) * (1 - min(step / decay_steps, 1)) ** power`, where `end` is "
    "`end_learning_rate`",
    "WarmUpLR": f"`mfwrap.schedules.ConstantWarmUpLR`, or{_IN_SCHEDULE} "
    "`learning_rate * min(step / warmup_steps, 1)`",
    "cosine_decay_lr": "`mfwrap.schedules.CosineWithWarmUpLR`, which computes each rate when its "
    "step begins, or `torch.optim.lr_scheduler.LambdaLR` with your list",
    "exponential_decay_lr": "`torch.optim.lr_scheduler.ExponentialLR`",
    "piecewise_constant_lr": "`torch.optim.lr_scheduler.MultiStepLR`, or "
    "`torch.optim.lr_scheduler.LambdaLR` with your list",
    "polynomial_decay_lr": "`mfwrap.schedules.PolynomialWithWarmUpLR`",
    "warmup_lr": "`mfwrap.schedules.ConstantWarmUpLR`",
    **each("inverse_decay_lr natural_exp_decay_lr", _FORMULA),
}

_MINDFORMERS: Mapping[str, str] = {
    "AdamW": "`torch.optim.AdamW(..., fused=True)`, and a separate schedule",
    "ADGENMetric": Without("it generates text; use the package `evaluate` after the training"),
    "Came": Without(
        "`torch.optim.Adafactor`, from which it stems, has second moments as small, but other "
        "updates"
    ),
    "ClipGradNorm": "`MFTrainOneStepCell(..., use_clip_grad=True, max_grad_norm=...)`, or "
    "`mfwrap.clip_by_global_norm` for your own gradients",
    "DataOrderWrapperCell": "`cell(**batch)`, which passes a batch by keyword in any order",
    "EmF1Metric": Without("it generates text; use the package `evaluate` after the training"),
    "FP32StateAdamWeightDecay": "`mfwrap.AdamWeightDecay(..., fp32_state=True)`",
    "FusedAdamWeightDecay": "`mfwrap.AdamWeightDecay(..., fp32_state=True)`",
    "GradAccumulationCellWithMultiOutputs": _ACCUMULATION,
    "GradAccumulationCellWithTwoOutput": f"{_ACCUMULATION}, with {_TWO_OUTPUTS}",
    "LearningRateWiseLayer": "a separate parameter group, `{'params': ..., 'lr': lr_scale * "
    "learning_rate}`: each schedule of `mfwrap.schedules` starts from the group's rate",
    "LocalNorm": "`MFTrainOneStepCell(..., local_norm=True)`",
    "MFPipelineWithLossScaleCell": "`MFTrainOneStepCell(..., use_clip_grad=True, "
    "gradient_accumulation_steps=micro_batch_num)`; for stages on several devices pass a "
    "schedule of `torch.distributed.pipelining` to the cell",
    "MindFormerConfig": _RECIPE,
    "MindFormerModuleType": Without("a script imports its classes; there is no registry"),
    "MindFormerRegister": Without("a script imports its classes; there is no registry"),
    "Muon": "`mfwrap.optimizers.Muon` for the matrices and `torch.optim.AdamW` for all other "
    "weights, in a `mfwrap.ChainedOptimizer`; its `qk_clip_threshold` is "
    "`mfwrap.optimizers.QKClip`",
    **each(
        "FusedPmaAdamW PmaAdamW",
        "`torch.optim.AdamW` and `mfwrap.ExponentialMovingAverage`, whose average stays beside the "
        "weights; MindFormers replaces the weights by theirs",
    ),
    "PerplexityMetric": "`metrics={'loss'}` of `mfwrap.Model`, and `math.exp` of the loss",
    "PipelineCellWithMultiOutputs": _PIPELINE,
    "PipelineCellWithTwoOutput": f"{_PIPELINE}; with {_TWO_OUTPUTS}",
    "Trainer": f"`mfwrap.trainer.MFTrainer`, or {_RECIPE}",
    "TrainingArguments": "`transformers.TrainingArguments`",
    "_get_loss_output": "the fields of `net_outputs`, such as `loss`, `overflow`, `loss_scale` and "
    "`learning_rate`; of a step of your own, what its `__call__` returns",
    "barrier_world": "`torch.distributed.barrier`",
    "get_real_group_size": "`accelerate.PartialState().num_processes`",
    "get_real_rank": "`accelerate.PartialState().process_index`",
    "build_wrapper": "`mfwrap.MFTrainOneStepCell`, or a recipe that `mfwrap train` runs",
    "init_context": f"{_DEVICE}; {_LAUNCH} for several ranks",
    "logger": "Python's module `logging`",
    **each(
        "build_callback build_lr build_metric build_model build_optim build_parallel_config "
        "build_trainer",
        _RECIPE,
    ),
    **each("build_context", _DEVICE),
    **each(
        "AutoConfig AutoImageProcessor AutoModel AutoModelForCausalLM AutoProcessor AutoTokenizer "
        "GenerationConfig LlamaConfig LlamaForCausalLM LlamaModel LlamaTokenizer "
        "LlamaTokenizerFast LogitsProcessor LogitsProcessorList PreTrainedModel "
        "PreTrainedTokenizer PreTrainedTokenizerFast PretrainedConfig TextIteratorStreamer "
        "TextStreamer",
        "`transformers.{}`",
    ),
}

_CALLBACKS: Mapping[str, str] = {
    "BackupAndRestore": _RESUME,
    "CheckpointCallback": "`mfwrap.callbacks.CheckpointMonitor`",
    "ClusterMonitor": "`mfwrap.callbacks.RankClock`, which records the step times of all ranks",
    "EvalCallBack": "`mfwrap.callbacks.EvalCallback`",
    "FlopsUtilizationCollector": "`mfwrap.callbacks.MFLossMonitor`, which logs the throughput and "
    "its share of the device's peak rate",
    "LossCallback": "`mfwrap.callbacks.MFLossMonitor`",
    "MaxLogitsMonitor": "`mfwrap.callbacks.TrainingStateMonitor`",
    "OnRequestExit": _SIGTERM,
    "SummaryLandscape": Without("mfwrap draws no loss landscape"),
    "TrainCallBack": "`mfwrap.callbacks.LambdaCallback` that calls `request_stop` at a step",
    "TrainFaultTolerance": _RESUME,
    "TrainerCallback": "`mfwrap.callbacks.PyNativeCallback`, and `adapt_pynative` around the "
    "callback that a Trainer gets; or `transformers.TrainerCallback`",
    **each("SDCMonitor StressDetectCallBack", _RECOMPUTE),
    "StressTestModelMonitor": _REPLICAS,
    **each("SummaryCollector SummaryMonitor", _TENSORBOARD),
    **each(
        "ColdHotExpertMonitor ExpertMigrateCallback MoEDropRateCallback",
        _EXPERTS,
    ),
    "TopkBiasBalanceCallback": "`mfwrap.optimizers.ExpertBias`, which moves the biases by which "
    "routers choose experts after each update",
}

_MODULES: Mapping[str, str] = {
    "communication": "`torch.distributed`, whose ranks accelerate starts and connects",
    "dataset": "`torch.utils.data`",
    "experimental": "`torch.optim`",
    "initializer": "`torch.nn.init`",
    "log": "Python's module `logging`",
    "mindformers": "`mfwrap`, and `transformers` for models",
    "mindspore": "`torch`, and `mfwrap` for what belongs to the training step",
    "mindspore.numpy": "`torch` in a network, and `numpy` elsewhere",
    "mint": "`torch`, whose names `mint` has",
    "nn": _MINDSPORE["nn"],
    "ops": _MINDSPORE["ops"],
    "transforms": "`torchvision.transforms`",
}

_LOG: Mapping[str, str] = each("critical debug error info warning", "`logging.{}`")

_PROCESSES = "`accelerate.PartialState().{}`"

_COMMUNICATION: Mapping[str, str] = {
    "GlobalComm": "nothing: the default process group of `torch.distributed`",
    "HCCL_WORLD_COMM_GROUP": "nothing: the default process group of `torch.distributed`",
    "NCCL_WORLD_COMM_GROUP": "nothing: the default process group of `torch.distributed`",
    "create_group": "`torch.distributed.new_group`",
    "destroy_group": "`torch.distributed.destroy_process_group`",
    "get_group_size": _PROCESSES.format("num_processes"),
    "get_local_rank": _PROCESSES.format("local_process_index"),
    "get_rank": _PROCESSES.format("process_index"),
    "init": f"nothing: {_LAUNCH} starts the ranks, and accelerate connects them",
    "release": _PROCESSES.format("destroy_process_group()"),
    **each(
        "all_gather_into_tensor all_reduce barrier broadcast irecv isend recv reduce "
        "reduce_scatter_tensor send",
        "`torch.distributed.{}`, which works in place",
    ),
}

ROWS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "mindspore": _MINDSPORE,
        "nn": _NN,
        "mindformers": _MINDFORMERS,
        "callbacks": _CALLBACKS,
        "communication": _COMMUNICATION,
        "log": _LOG,
        "module": _MODULES,
    }
)
"""What to write for a name, by area and name."""
