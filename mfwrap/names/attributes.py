"""Attributes of MindSpore's objects that scripts read, and what to write for each.

The keys of `ROWS` are kinds of objects. `ANYWHERE` and `KINDS` tell a reader of scripts which
attribute belongs to which kind.
"""

from collections.abc import Mapping
from types import MappingProxyType

from mfwrap.names.texts import SAME, Without, each

_CELL = "cb_params.train_network"
_APPLIED = (
    f"`{_CELL}.last_report.applied_updates` in a callback; with a `TrainOneStepCell`, which skips "
    "no update, `cb_params.cur_step_num`; in a step of your own a number that it counts"
)
_FIRST = "`optimizer.param_groups[0][{!r}]`, of the first group"
_RATES = (
    "`optimizer.param_groups[0]['lr']`, a number, or "
    "`[group['lr'] for group in optimizer.param_groups]` with groups of several rates"
)
_LISTED = "`[p for group in optimizer.param_groups for p in group['params']]`"
_STATE = "`optimizer.state[parameter][{!r}]`"
_OF_UPDATE = "nothing: `step` of a torch optimizer does it"
_COUNT = "`self.state[parameter]['step']`, which your `step` counts"
_DIVIDED = "nothing: accelerate or `torch.distributed.fsdp` divides the optimizer"
_UNSCALED = "nothing: the training cell has unscaled the gradients before the optimizer runs"
_OPERATOR = "a function of `torch`: the cells of mfwrap have no operators as attributes"
_REDUCES = "nothing: `get_overflow_status` asks all ranks, and `grad_reducer` knows them"
_COMPILER = "nothing: it is for MindSpore's compiler"

_CB_PARAMS: Mapping[str, str] = {
    **each(
        "batch_num cur_epoch_num cur_step_num dataset_sink_mode device_number epoch_num "
        "eval_network eval_results initial_step last_save_ckpt_step latest_ckpt_file list_callback "
        "loss_fn loss_scale_mananger metrics mode net_outputs network optimizer parallel_mode "
        "sink_size train_dataset train_network valid_dataset",
        SAME,
    ),
    "cur_epoch": "`cur_epoch_num`",
    "dataset_helper": "`train_dataset`",
    "eval_dataset_element": Without("a batch is a tuple or a mapping; keep it in your data set"),
    "is_arf": "nothing: `mfwrap.trainer.MFTrainer` resumes after a failure",
    "train_dataset_element": Without("a batch is a tuple or a mapping; keep it in your data set"),
}

_RUN_CONTEXT: Mapping[str, str] = each("get_stop_requested original_args request_stop", SAME)

_CELLS: Mapping[str, str] = {
    **each(
        "get_overflow_status grad grad_reducer hyper_map loss_scaling_manager network optimizer "
        "process_loss_scale reducer_flag return_grad scale_sense sens set_sense_scale "
        "start_overflow_check weights",
        SAME,
    ),
    "accu_grads": "nothing: `gradient_accumulation_steps` of the cell accumulates in `grad`",
    "base": "1.0: it is the number from which an overflow is counted",
    "calculate_per_token_loss": "`config.calculate_per_token_loss`",
    "clip_grad_norm": "`mfwrap.clip_by_global_norm(grads, max_grad_norm)`",
    "construct": "`__call__`, and return `loss.detach()`",
    "enable_tuple_broaden": _COMPILER,
    "global_norm_spike_threshold": "`config.global_norm_spike_threshold`",
    "init_parameters_data": "nothing: parameters of torch have their values at once",
    "grad_scale_factor": "nothing: the cell divides by tokens when `calculate_per_token_loss` is "
    "set",
    "learning_rate": "`optimizer.param_groups[0]['lr']`, or `lr_scheduler` of the cell",
    "local_norm": "`config.local_norm`",
    "localnorm": "`last_report.output.local_norm`",
    "max_grad_norm": "`config.max_grad_norm`",
    "micro_size": "`config.gradient_accumulation_steps`",
    "parallel_config": Without("MindFormers' parallel settings exist in MindFormers alone"),
    "use_clip_grad": "`config.use_clip_grad`",
    "use_grouped_lr": "`len(optimizer.param_groups) > 1`",
    "use_skip_data_by_global_norm": "`config.use_skip_data_by_global_norm`",
    **each(
        "alloc_status cast clear_before_grad concat equal get_status less_equal logic_and "
        "logic_not logic_or reduce_all reduce_sum reshape select",
        _OPERATOR,
    ),
    **each("allreduce degree is_distributed mean parallel_mode gpu_target", _REDUCES),
    **each(
        "aux_loss_parameter indexer_loss_parameter lm_loss_parameter mtp_loss_parameter "
        "print_separate_loss",
        "`last_report.losses`, by name, for a network that returns several losses",
    ),
    **each(
        "exit_param graceful_exit init_param use_graceful_exit",
        "nothing: `mfwrap.trainer.MFTrainer` saves a checkpoint on SIGTERM",
    ),
    **each("add_flags add_flags_recursive compile compile_cache phase set_jit_config", _COMPILER),
    "scale_sense =": "`self.set_sense_scale(value)`, or pass the loss scale to "
    "`super().__init__`: the attribute cannot be assigned",
    "set_train": "`network.train()`: the cell is a plain object",
    **each(
        "get_parameters parameters_dict parameters_and_names trainable_params",
        "`network.named_parameters()`: the cell is a plain object",
    ),
}

_OPTIMIZER: Mapping[str, str] = {
    "__call__": "`self.apply_gradients(grads)` in a training cell; elsewhere put each gradient "
    "into its parameter's `grad`, and call `optimizer.step()`",
    "construct": "`step`",
    "dynamic_lr": f"`{_CELL}.lr_scheduler is not None`; the rate itself is always a number",
    "dynamic_weight_decay": "`False`: the decay in `param_groups` is a number",
    "get_lr": _RATES,
    "get_lr_parameter": "the group's rate, `group['lr']` of `optimizer.param_groups`",
    "get_weight_decay": "`[group['weight_decay'] for group in optimizer.param_groups]`",
    "global_step": _APPLIED,
    "learning_rate": f"{_FIRST.format('lr')}: the rate of this step, also where MindSpore has a "
    "schedule that is called with the step",
    "param_length": f"the length of {_LISTED}",
    "set_train": "nothing: torch's optimizers have no modes",
    "weight_decay": _FIRST.format("weight_decay"),
    "loss_scale=": "`gradient / loss_scale` before the optimizer gets the gradients: torch's "
    "optimizers have no such argument. `Model` and `TrainOneStepWithLossScaleCell` have divided "
    "by their loss scale",
    **each(
        "_parameters parameters",
        f"{_LISTED}, or `weights` of the training cell; for its `clone`, a tuple of "
        "`torch.zeros_like(p)` or `p.detach().clone()`",
    ),
    **each("group_lr group_params group_weight_decay", "`optimizer.param_groups`"),
    **each("is_group is_group_lr is_group_params_ordered", "`len(optimizer.param_groups) > 1`"),
    **each("exp_avg moment1 moments1", _STATE.format("exp_avg")),
    **each("exp_avg_sq moment2 moments2", _STATE.format("exp_avg_sq")),
    **each("accum moments", _STATE.format("momentum_buffer")),
    **each("loss_scale need_scale reciprocal_scale scale_grad", _UNSCALED),
    **each(
        "assignadd decay_flags decay_weight exec_weight_decay flatten_gradients "
        "global_step_increase_tensor gradients_centralization hyper_map map_ map_reverse "
        "optim_filter",
        _OF_UPDATE,
    ),
    **each("broadcast_params dev_num enable_tuple_broaden param_rank use_parallel", _DIVIDED),
    **each("get_parameters parameters_dict trainable_params", "`optimizer.state_dict()`"),
}

_OF_GROUPS = "`group[{!r}]` of each group in `self.param_groups`"

_OPTIMIZER_CLASS: Mapping[str, str] = {
    "construct": "`step`, without arguments: each parameter has its gradient in `grad`",
    "decay_weight": "`gradient.add(parameter, alpha=group['weight_decay'])` for each gradient; "
    "without groups, MindSpore's leaves out the parameters with `beta` or `gamma` in their names",
    "dynamic_lr": "`False`: a schedule outside of the optimizer changes `group['lr']`",
    "flatten_gradients": "nothing: each parameter of torch has a gradient of its own",
    "get_lr_parameter": _OF_GROUPS.format("lr"),
    "gradients_centralization": "`gradient - gradient.mean(tuple(range(1, gradient.ndim)), "
    "keepdim=True)` for weights of two and more dimensions, in groups that ask for it",
    "optim_filter": _DIVIDED,
    **each("assignadd global_step global_step_increase_tensor", _COUNT),
    **each("get_lr group_lr learning_rate", _OF_GROUPS.format("lr")),
    **each(
        "get_weight_decay group_weight_decay weight_decay weight_decay_tensor",
        _OF_GROUPS.format("weight_decay"),
    ),
    **each("decay_flags exec_weight_decay", "`group['weight_decay'] > 0`"),
    **each("is_group is_group_lr", "`True`: torch has all parameters in `self.param_groups`"),
    **each("hyper_map map_ map_reverse", "a Python loop over the parameters of each group"),
    **each(
        "_parameters group_params parameters",
        _OF_GROUPS.format("params") + "; for its `clone`, a tensor in `self.state[parameter]`",
    ),
}
"""Attributes of `self` for which an optimizer's class writes something else than its users."""

_SCHEDULE: Mapping[str, str] = {
    "construct": "`__call__`: `torch.optim.lr_scheduler.LambdaLR` passes the number of updates as "
    "an int, and multiplies the optimizer's `lr` by the result",
}

_NETWORK: Mapping[str, str] = {
    "add_flags": _COMPILER,
    "add_flags_recursive": _COMPILER,
    "cells": "`children()`",
    "cells_and_names": "`named_modules()`",
    "compile_cache": _COMPILER,
    "construct": "`forward`",
    "get_parameters": "`parameters()`",
    "init_parameters_data": "nothing: parameters of torch have their values at once",
    "insert_child_to_cell": "`add_module(name, module)`",
    "insert_param_to_cell": "`register_parameter(name, parameter)`",
    "name_cells": "`named_children()`",
    "parameters_and_names": "`named_parameters()`",
    "parameters_dict": "`dict(network.named_parameters())`",
    "recompute": "`gradient_checkpointing_enable()` of a model of transformers, or "
    "`torch.utils.checkpoint.checkpoint`",
    "set_broadcast_flag": "nothing: accelerate sends the weights to all ranks at the start",
    "set_comm_fusion": "nothing: DistributedDataParallel joins gradients in buckets",
    "set_grad": "nothing: a parameter of torch requires gradients unless it is frozen",
    "set_inputs": _COMPILER,
    "set_jit_config": _COMPILER,
    "set_train": "`train()`, and `eval()` for `set_train(False)`",
    "shard": Without("MindSpore's parallel strategies exist in MindSpore alone; see docs/ranks.md"),
    "to_float": "`mfwrap.Model(..., amp_level=...)`, or `torch.autocast` around the network",
    "trainable_params": "`parameters()`",
    "untrainable_params": "`[p for p in network.parameters() if not p.requires_grad]`",
    "update_parameters_name": "nothing: torch takes the names from the attributes of modules",
    # Of `cb_params.network`, which MindFormers gives as the training cell.
    "network": "`cb_params.network`, which is the network without the training cell",
    "optimizer": "`cb_params.optimizer`",
    "phase": _COMPILER,
}

_TENSOR: Mapping[str, str] = {
    "asnumpy": "`detach().cpu().numpy()`",
    "astype": "`to(dtype)`",
    "assign_value": "`copy_(value)` within `torch.no_grad()`",
    "cache_enable": "nothing: torch has no parameters in a cache",
    "clone_dtype": "`dtype`",
    "expand_dims": "`unsqueeze`",
    "flush_from_cache": "nothing: torch has no parameters in a cache",
    "from_numpy": "`torch.from_numpy`",
    "init_data": "nothing: parameters of torch have their values at once",
    "layerwise_parallel": "nothing: wrappers such as `torch.distributed.fsdp` divide parameters",
    "parallel_optimizer": "nothing: wrappers such as `torch.distributed.fsdp` divide parameters",
    "set_data": "`data.copy_(value)`",
    "set_dtype": "`data = data.to(dtype)`",
    "to_tensor": "nothing: the tensor itself",
    "value": "nothing: the parameter itself",
}

_DATASET: Mapping[str, str] = {
    "batch": "`batch_size` and `drop_last` of the DataLoader; `collate_fn` for `per_batch_map`",
    "column_names": "a data set that returns dicts: `{'data': ..., 'label': ...}`",
    "concat": "`torch.utils.data.ConcatDataset`",
    "create_dict_iterator": "a loop over the DataLoader of a data set that returns dicts",
    "create_tuple_iterator": "a loop over the DataLoader",
    "get_batch_size": "`batch_size` of the DataLoader",
    "get_col_names": "the keys of a batch",
    "get_dataset_size": "`len(loader)`",
    "map": "code in the data set's `__getitem__`",
    "num_classes": "a number of your own",
    "output_shapes": "the shapes of `next(iter(loader))`",
    "output_types": "the types of `next(iter(loader))`",
    "padded_batch": "`collate_fn` of the DataLoader",
    "project": "a data set that returns the columns",
    "rename": "a data set that returns the columns",
    "repeat": "`epoch` of `mfwrap.Model.train`",
    "reset": "nothing: each loop over the DataLoader begins anew",
    "shuffle": "`shuffle` of the DataLoader, which shuffles all samples",
    "skip": "`torch.utils.data.Subset`",
    "split": "`torch.utils.data.random_split`",
    "take": "`torch.utils.data.Subset`",
    "use_sampler": "`sampler` of the DataLoader",
    "zip": "`torch.utils.data.StackDataset`",
}

_DATASET_ARGUMENTS: Mapping[str, str] = {
    "batch_sampler": "`batch_sampler`",
    "column_names": "a data set that returns dicts: `{'data': ..., 'label': ...}`",
    "column_types": "the types that the data set returns; change them in `collate_fn`",
    "num_parallel_workers": "`num_workers`",
    "num_samples": "`torch.utils.data.Subset(dataset, range(num_samples))`",
    "sampler": "`sampler`",
    "shuffle": "`shuffle`, which is False by default; MindSpore shuffles a source with "
    "`__getitem__` unless `shuffle` is False or there is a `sampler`",
    "source": "`dataset`",
    **each(
        "num_shards shard_id",
        "nothing: `Model` and accelerate divide a DataLoader among ranks",
    ),
}

_UPDATE_CELL: Mapping[str, str] = {
    **each(
        "cur_iter get_loss_scale last_overflow_iter loss_scale_value scale_factor scale_window",
        SAME,
    ),
    "minimum_loss_scale": "`min_loss_scale`",
}

_MODEL: Mapping[str, str] = {
    **each("eval eval_network fit predict predict_network train train_network", SAME),
    **each("build infer_predict_layout infer_train_layout", _COMPILER),
}

_PYNATIVE_EVENTS: Mapping[str, str] = {
    **each(
        "on_epoch_begin on_epoch_end on_step_begin on_step_end on_train_begin on_train_end", SAME
    ),
    **each("on_begin on_end", "nothing: MindFormers never calls it"),
}

_PYNATIVE_ARGUMENTS: Mapping[str, str] = {
    **each(
        "eval_dataset grad_norm has_last loss lr_scheduler model optimizer pp_metric_reduce_group "
        "pp_metric_reduce_group_size train_dataset",
        SAME,
    ),
    "metric_reduce_group": "`torch.distributed.group.WORLD`",
    "metric_reduce_group_size": "`torch.distributed.get_world_size()`",
    "monitor": "`mfwrap.callbacks.TrainingStateMonitor`, as a callback of its own",
}

_PYNATIVE_SETTINGS: Mapping[str, str] = {
    **each("lr_scheduler model optimizer parallelism training", SAME),
    "callbacks": "`trainer.callback_handler.callbacks`",
    "checkpoint": "`save_strategy`, `save_steps` and `output_dir` of `args.training_arguments`",
    "context": "`args.training_arguments.device`",
    "eval_dataset": "`eval_dataset` of the keywords",
    "lora_config": "`peft_config` of the model",
    "monitor": "`mfwrap.callbacks.TrainingStateMonitor`, as a callback of its own",
    "profiler": "`mfwrap.callbacks.ProfileMonitor`, as a callback of its own",
    "recompute": "`args.training_arguments.gradient_checkpointing`",
    "train_dataset": "`train_dataset` of the keywords",
    **each("recompute_comm swap", Without("activations are neither swapped nor communicated")),
}

_PYNATIVE_STATE: Mapping[str, str] = {
    **each(
        "best_metric best_model_checkpoint consumed_samples epoch epoch_step eval_steps "
        "global_batch_size global_step is_train_begin is_train_end loss_scale max_steps "
        "num_accumulation_steps",
        SAME,
    ),
    "is_world_process_zero": "`torch.distributed.get_rank()`",
    "log_history": "`loss` and `grad_norm` of the keywords",
    "save_steps": "`args.training_arguments.save_steps`",
    "total_flops": "`mfwrap.callbacks.MFLossMonitor`, which logs the throughput",
}

ROWS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cb_params": _CB_PARAMS,
        "run_context": _RUN_CONTEXT,
        "training cell": _CELLS,
        "optimizer": _OPTIMIZER,
        "optimizer class": _OPTIMIZER_CLASS,
        "learning-rate schedule": _SCHEDULE,
        "network": _NETWORK,
        "tensor": _TENSOR,
        "data set": _DATASET,
        "argument of GeneratorDataset": _DATASET_ARGUMENTS,
        "loss-scale update cell": _UPDATE_CELL,
        "Model": _MODEL,
        "PyNative event": _PYNATIVE_EVENTS,
        "PyNative argument": _PYNATIVE_ARGUMENTS,
        "PyNative settings": _PYNATIVE_SETTINGS,
        "PyNative state": _PYNATIVE_STATE,
    }
)
"""What to write for an attribute, by kind of object and attribute."""

KINDS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("Model", "eval_network"): "network",
        ("Model", "train_network"): "training cell",
        ("cb_params", "network"): "network",
        ("cb_params", "optimizer"): "optimizer",
        ("cb_params", "train_dataset"): "data set",
        ("cb_params", "train_network"): "training cell",
        ("network", "network"): "network",
        ("network", "optimizer"): "optimizer",
        ("run_context", "original_args"): "cb_params",
        ("training cell", "loss_scaling_manager"): "loss-scale update cell",
        ("training cell", "network"): "network",
        ("training cell", "optimizer"): "optimizer",
        ("training cell", "scale_sense"): "tensor",
    }
)
"""Kind of an object's attribute, or of what its method returns."""

ANYWHERE: Mapping[str, str] = MappingProxyType(
    {
        "asnumpy": "tensor",
        "cells_and_names": "network",
        "create_dict_iterator": "data set",
        "create_tuple_iterator": "data set",
        "flush_from_cache": "tensor",
        "get_dataset_size": "data set",
        "insert_child_to_cell": "network",
        "init_parameters_data": "network",
        "name_cells": "network",
        "original_args": "run_context",
        "parameters_and_names": "network",
        "parameters_dict": "network",
        "set_comm_fusion": "network",
        "set_grad": "network",
        "set_jit_config": "network",
        "set_train": "network",
        "to_float": "network",
        "trainable_params": "network",
        "untrainable_params": "network",
        "update_parameters_name": "network",
    }
)
"""Kind of the object, for attributes that only MindSpore's objects of this kind have."""
