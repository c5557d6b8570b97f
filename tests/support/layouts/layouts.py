"""The layouts of ranks that the table in docs/ranks.md compares with one process."""

from support.layouts import networks
from support.layouts.layout import Layout
from support.layouts.pretrained import Pretrained

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
    Pretrained("transformers' tensor parallelism: `tp_size=2`", 2, "tp", resumes_on=(1, 3)),
    Pretrained("transformers' `fsdp_size=2`", 2, "fsdp", resumes_on=(1, 3)),
    Pretrained("transformers' `tp_size=2`, `fsdp_size=2`", 4, "tp and fsdp", resumes_on=(2, 1)),
    Pretrained("transformers' experts: `ep_size=2`, `fsdp_size=2`", 2, "experts", resumes_on=(1,)),
    Pretrained(
        "transformers' experts: `ep_size=2`, `fsdp_size=4`", 4, "experts", resumes_on=(2, 1)
    ),
]
"""Rows of the table, in order."""


def layout_of(name: str) -> Layout:
    """Return the layout of a row."""
    return next(layout for layout in LAYOUTS if layout.name == name)
