"""Count the updates of a rank, and say what it does."""

from dataclasses import dataclass, replace
from typing import final

_HAS_RAISED = "has raised"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What one rank says about itself."""

    training: int = 0
    """Number of the training in this process; 0 for a loop without `RankWatch.training`."""

    begun: int = 0
    """Number of updates that the rank has begun."""

    done: int = 0
    """Number of updates that the rank has finished."""

    end: str = ""
    """How the rank's training ended; empty while it trains."""

    place: str = ""
    """Where the rank's main thread is; empty if the rank has not answered."""

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the rank's last update."""
        return self.end.startswith(_HAS_RAISED)

    @property
    def answers(self) -> bool:
        """Whether the rank has answered, or has said that its training has ended."""
        return bool(self.place or self.end)

    def description(self, rank: int) -> str:
        """Return the status of a rank in words."""
        where = f"in update {self.begun}" if self.begun > self.done else f"after update {self.done}"
        if self.end:
            return f"rank {rank} {self.end}"
        if not self.place:
            return f"rank {rank} does not answer and was last seen {where}"
        return f"rank {rank} is {where}, at {self.place}"


@final
class Progress:
    """Count the updates of this rank. Its methods only replace `status`."""

    def __init__(self) -> None:
        self.status = RankStatus()
        """Status of this rank, without its place. Another thread may read it at any moment."""

    def begin_training(self) -> None:
        """Count the updates of another training, from 0."""
        self.status = RankStatus(training=self.status.training + 1)

    def begin_update(self) -> None:
        """Note that the next update has begun, unless it has begun already."""
        self.status = replace(self.status, begun=self.status.done + 1, end="")

    def end_update(self) -> None:
        """Note that the update has ended."""
        self.status = replace(self.status, done=self.status.begun)

    def fail(self, error: Exception) -> None:
        """Note that an error has ended the training."""
        # Errors of torch's pipelines begin with an empty line.
        message = str(error).strip().partition("\n")[0]
        where = f"{type(error).__name__} in update {self.status.begun}"
        self.status = replace(self.status, end=f"{_HAS_RAISED} {where}: {message}")

    def go_on(self) -> None:
        """Forget an error that has ended an update: this rank has met the other ranks again."""
        self.status = replace(self.status, begun=self.status.done, end="")

    def leave(self, what: str) -> None:
        """Note that the rank has ended its training, for example by ``has ended its program``."""
        if not self.status.end:
            self.status = replace(self.status, end=f"{what} after update {self.status.done}")

    def waits_in(self) -> tuple[int, int] | None:
        """Return the numbers of the training and of its present update; ``None`` outside of one."""
        status = self.status
        waits = status.begun > status.done and not status.end
        return (status.training, status.begun) if waits else None
