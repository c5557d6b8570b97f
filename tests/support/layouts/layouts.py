"""The layouts of ranks that the table in docs/ranks.md compares with one process."""

from support.layouts import networks
from support.layouts.accelerated import (
    Accelerated,
    AcceleratedPretrained,
    prepare_tensor_parallel_shards,
)
from support.layouts.context import ContextParallel, attend_by_ring
from support.layouts.layout import Layout
from support.layouts.pipeline import Pipeline
from support.layouts.pretrained import Pretrained
from support.layouts.unable import Unable

__all__ = ["LAYOUTS", "Layout", "layout_of"]

LAYOUTS = [
    Layout("`DistributedDataParallel`", 2, networks.in_ddp, resumes_on=(1, 3)),
    Layout("`fully_shard`", 2, networks.in_fsdp, resumes_on=(1, 3)),
    Layout("`fully_shard` with replicas", 4, networks.in_hsdp, resumes_on=(2, 1)),
    Layout(
        "tensor parallelism by columns and rows",
        2,
        networks.in_tensor_parallel,
        ranks_per_share=0,
        resumes_on=(1, 3),
    ),
    Layout(
        "sequence parallelism",
        2,
        networks.in_sequence_parallel,
        ranks_per_share=0,
        resumes_on=(1, 3),
    ),
    Layout(
        "tensor parallelism and `fully_shard`",
        4,
        networks.in_tensor_parallel_and_fsdp,
        ranks_per_share=2,
        resumes_on=(2, 1),
    ),
    ContextParallel(
        "context parallelism by gathered keys and values, `fully_shard`",
        2,
        networks.in_fsdp,
        resumes_on=(1, 3),
    ),
    Unable(
        "torch's `context_parallel`",
        2,
        attend_by_ring,
        "Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have",
        "it has no attention kernel for a CPU",
    ),
    Pretrained("transformers' tensor parallelism: `tp_size=2`", 2, "tp", resumes_on=(1, 3)),
    Pretrained("transformers' `fsdp_size=2`", 2, "fsdp", resumes_on=(1, 3)),
    Pretrained("transformers' `tp_size=2`, `fsdp_size=2`", 4, "tp and fsdp", resumes_on=(2, 1)),
    Pretrained(
        "transformers' `dp_replicate_size=2`, `fsdp_size=2`", 4, "replicas", resumes_on=(2, 1)
    ),
    Pretrained(
        "transformers' experts: `ep_size=2`, `tp_size=2`", 2, "tp and experts", resumes_on=(1,)
    ),
    Pretrained("transformers' experts: `ep_size=2`, `fsdp_size=2`", 2, "experts", resumes_on=(1,)),
    Pretrained(
        "transformers' experts: `ep_size=2`, `fsdp_size=4`", 4, "experts", resumes_on=(2, 1)
    ),
    Accelerated(
        "accelerate's `ParallelismConfig(dp_shard_size=2)`", 2, replicates=False, resumes_on=(1, 3)
    ),
    Accelerated(
        "accelerate's `ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)`",
        4,
        replicates=True,
        resumes_on=(2, 1),
    ),
    AcceleratedPretrained(
        "accelerate's `ParallelismConfig(tp_size=2)`", 2, "tp", resumes_on=(1, 3)
    ),
    Unable(
        "accelerate's `ParallelismConfig(dp_shard_size=2, tp_size=2)`",
        4,
        prepare_tensor_parallel_shards,
        "cannot import name 'ReplicateParallel' from 'transformers",
        "accelerate 1.15 imports a name that transformers 5.23 lacks",
    ),
    Pipeline("stages of a pipeline", 2, resumes_on=(2, 4)),
    Pipeline("stages of a pipeline in DistributedDataParallel", 4, "ddp", resumes_on=(2, 4)),
    Pipeline("stages of a pipeline in `fully_shard`", 4, "fsdp", resumes_on=(2, 4)),
]
"""Rows of the table, in order."""


def layout_of(name: str) -> Layout:
    """Return the layout of a row."""
    return next(layout for layout in LAYOUTS if layout.name == name)
