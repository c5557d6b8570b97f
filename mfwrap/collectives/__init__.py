"""Start collectives, count ranks, and report ranks that do not take part."""

from mfwrap.collectives.announcements import Announcements, all_ranks_meet, rank_announcements
from mfwrap.collectives.calls import (
    add_over_ranks,
    any_rank,
    begin_adding_over_ranks,
    broadcast_from_main,
    end_group,
    gather_objects,
    gather_on_all,
    gather_on_main,
    is_first_on_node,
    new_host_group,
    num_ranks,
    raising_together,
    ranks_of,
    this_rank,
)
from mfwrap.collectives.clock import Section, section_clock
from mfwrap.collectives.launch import leave_shared_store, refuse_lone_process, start_failure
from mfwrap.collectives.watch import RankWatch, rank_watch

__all__ = [
    "Announcements",
    "RankWatch",
    "Section",
    "add_over_ranks",
    "all_ranks_meet",
    "any_rank",
    "begin_adding_over_ranks",
    "broadcast_from_main",
    "end_group",
    "gather_objects",
    "gather_on_all",
    "gather_on_main",
    "is_first_on_node",
    "leave_shared_store",
    "new_host_group",
    "num_ranks",
    "raising_together",
    "rank_announcements",
    "rank_watch",
    "ranks_of",
    "refuse_lone_process",
    "section_clock",
    "start_failure",
    "this_rank",
]
