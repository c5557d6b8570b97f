"""Say in words what went wrong in a run, why, where, in which samples, and what the run did."""

import html
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mfwrap.callbacks.culprit.anomaly_log import KINDS, SHIFTS
from mfwrap.callbacks.culprit.good_checkpoints import newest_good, shown_from
from mfwrap.records.episodes import Episode
from mfwrap.records.forms import to_number
from mfwrap.records.rewards import (
    ALIKE,
    FEW,
    REWARD,
    constant_rewards,
    since_when_untaught,
    why_untaught,
)
from mfwrap.records.rollbacks import RollbackRecord
from mfwrap.records.run_record import NOT_ENDED, Curve, RunRecord
from mfwrap.report.about import breakable
from mfwrap.report.curves import NUMBER
from mfwrap.report.samples import NONE_NAMED, compared, samples_of

_UNKNOWN = "\N{EN DASH}"
_NO_CAUSE = "unknown"
_MOST_NAMES = 3
_MOST_IN_SHORT = 3
"""Number of episodes that the headline shows."""

_MOST_ROWS = 200
"""Largest number of rows of the table."""

_MANY_ROWS = 8
"""Number of rows above which the table scrolls within the page."""

_AFTERMATH = 5
"""Number of steps within which any bad step may have caused the next one."""

_COLUMNS = ("Steps", "What happened, and why", "Where", "Samples", "What the run did")

_PLACES = {
    "input": "input {}",
    "targets": "targets {}, all of them ignored",
    "weight": "weight {}",
    "weights": "most weights, among them {}",
    "other_weight": "weight {} of a model beside the network",
    "received": "input of {}",
    "activation": "output of {}",
    "gradient": "gradient of {}",
}
"""What is at fault, by the field ``where``."""

_CAUSES = {
    "attention_logits": "growing attention logits",
    "activation": "an operation in the forward",
    "batch_norm": "ruined BatchNorm statistics",
    "buffer_changed": "a changed buffer",
    "data": "bad data",
    "dead_layer": "dead layer",
    "diverged": "not known; the loss has diverged",
    "first_loss": "the first loss",
    "gradient": "an operation in the backward",
    "learning_rate": "learning rate too high",
    "loss": "computation of the loss",
    "optimizer_epsilon": "optimizer's epsilon too small for its dtype",
    "optimizer_state": "changed optimizer state",
    "rank_data": "bad data on one rank",
    "rank_differs": "one rank differs",
    "router": "collapsed router",
    "silent_data_corruption": "silent data corruption",
    "transient": "transient fault",
    "weight_changed": "a changed weight",
}
"""Causes in words, by the field ``cause``."""

_UNWATCHED = (
    "Nothing has looked for anomalies: a recipe does with "
    "<code>monitor_config: {monitor_on: true, replay: true}</code>, and a script with a "
    "<code>TrainingStateMonitor(replay=True)</code>."
)

_OF_LOSS = frozenset({"loss", "setting"})
"""Causes that may raise the loss and leave the network as it was."""

_REPLAYS = {
    "reproduced": "a second run of the step found the fault again, so it is not transient",
    "not_reproduced": "a second run of the step did not find the fault again",
    "not_covered": "a second run of the network was finite: the fault is outside of it",
    "failed": "a second run of the step failed",
}


class _Event(NamedTuple):
    """An episode or a rollback as text; everything but steps is HTML."""

    run: RunRecord
    number: int
    """Index of the run."""

    first: int
    last: int
    num_steps: int
    what: str
    """Kind in words."""

    explanation: str
    action: str
    """What the run did about it."""

    cause_words: str = ""
    """Cause in two or three words; empty for a rollback."""

    suggestion: str = ""
    lines: Sequence[str] = ()
    """Evidence, a clause each."""

    where: Sequence[str] = ()
    samples: Sequence[str] = ()
    before: str = ""
    """The episode or rollback that ended shortly before, or that still goes on."""


def headline(runs: Sequence[RunRecord]) -> str:
    """Return what went wrong in each run, and how it ended: the first episodes in short."""
    return "".join(_headline(run, number, runs) for number, run in enumerate(runs))


def _headline(run: RunRecord, number: int, runs: Sequence[RunRecord]) -> str:
    name = f"{html.escape(run.name)}: " if len(runs) > 1 else ""
    diverged = next((one for one in run.episodes if one.has_diverged), None)
    told = "" if diverged is None else _diverged(diverged, run)
    told += _untaught(run)
    # What has ended a failed run comes first.
    before, after = (f"{_end(run)} ", "") if "error" in run.facts else ("", f" {_end(run)}")
    events = _events(run, number)
    if not events:
        noted = f", but {_counted(len(run.notes), 'note')} below" if run.notes else ""
        none = f"No anomalies were recorded{noted}." if run.is_watched else _UNWATCHED
        none = f"{name}{before}{told}{none}{after}"
        return f'<p class="headline">{none}</p>{_notes(run, number)}'
    counts = [_counted(len(run.episodes), "episode")] if run.episodes else []
    counts += [_counted(len(run.rollbacks), "rollback")] if run.rollbacks else []
    alike: dict[tuple[str, str], list[_Event]] = {}
    for event in events:
        alike.setdefault((event.what, event.cause_words), []).append(event)
    # What has a cause says more than what came before it without one.
    chosen = sorted(alike.values(), key=lambda group: group[0].cause_words == _NO_CAUSE)
    chosen = sorted(chosen[:_MOST_IN_SHORT], key=lambda group: group[0].first)
    left = len(events) - sum(map(len, chosen))
    rest = f'<p class="note">{left} more of other kinds in the table below.</p>' if left else ""
    counted = f"<strong>{told}{' and '.join(counts)} in {run.last_step()} steps.</strong>"
    return (
        f'<p class="headline">{name}{before}{counted}{after}</p>'
        f"{''.join(map(_in_short, chosen))}{rest}{_notes(run, number)}"
    )


def _diverged(episode: Episode, run: RunRecord) -> str:
    """Say that the loss has not come back, and which checkpoint is from before.

    Another computation of the loss is no divergence.
    """
    if episode.cause in _OF_LOSS:
        return f"The loss has not come back since step {shown_from(episode)}. "
    good = newest_good(episode, run.checkpoints, run.facts.get("resumed") or ())
    return f"Diverged at step {shown_from(episode)}{good}. "


def _untaught(run: RunRecord) -> str:
    """Say that rewards have taught nothing in a run that has ended, or has logged a few of them."""
    shares, rewards = run.curves.get(ALIKE, Curve()), run.curves.get(REWARD, Curve())
    if len(shares.steps) < FEW and run.facts.get("state", NOT_ENDED) == NOT_ENDED:
        return ""
    at = dict(zip(rewards.steps, rewards.values, strict=True))
    logs = [
        (step, share, at.get(step)) for step, share in zip(shares.steps, shares.values, strict=True)
    ]
    why = why_untaught((share, reward) for _, share, reward in logs)
    if why is not None:
        return f"The rewards have taught nothing: {why}. "
    if since := since_when_untaught(logs):
        return f"The rewards teach nothing any more: {since}. "
    by_step: dict[int, dict[str, float]] = {}
    for name, curve in run.curves.items():
        if name.startswith("rewards/"):
            for step, value in zip(curve.steps, curve.values, strict=True):
                by_step.setdefault(step, {})[name] = value
    same = html.escape(" and ".join(constant_rewards(by_step.values())))
    return f"All answers got the same reward from {same}, which teaches nothing. " if same else ""


def _notes(run: RunRecord, number: int) -> str:
    """Return what should not be so in any run, which may be meant."""
    listed = []
    # Rewards that teach nothing make all gradients zero, and the headline says the first.
    is_told = bool(_untaught(run))
    notes = [one for one in run.notes if not (is_told and one.get("cause") == "no_gradient")]
    for note in notes[:_MOST_ROWS]:
        step = note["step"]
        link = f'<a href="#loss" data-run="{number}" data-step="{step}" data-last="{step}">'
        words = "; ".join(_escaped(note.get(name) or "" for name in ("explanation", "suggestion")))
        listed.append(f"<li>{link}Step {step}</a>: {words}</li>")
    if not listed:
        return ""
    title = "Unusual in any run, though it may be intended:"
    return f'<div class="note">{title}<ul>{"".join(listed)}</ul></div>'


def _in_short(alike: Sequence[_Event]) -> str:
    """Return what must be known about the first of events of the same kind and cause."""
    event, more = alike[0], len(alike) - 1
    rest = ["more in the table below"] if event.samples[_MOST_NAMES:] else []
    again = f"{more} more like this, the last at step {_link(alike[-1])}"
    named = (line for each in alike[1:] for line in each.samples)
    if any(not line.startswith(NONE_NAMED) for line in named):
        again += "; their samples are in the table below"
    facts = {
        "Cause": _cause(event),
        "Just before": event.before,
        "Where": ", ".join(event.where),
        "Samples": "<br>".join([*event.samples[:_MOST_NAMES], *rest]),
        "What the run did": event.action,
        "What to do": event.suggestion,
        "Again": again if more else "",
    }
    listed = "".join(f"<dt>{term}</dt><dd>{fact}</dd>" for term, fact in facts.items() if fact)
    steps = "Steps" if event.last > event.first else "Step"
    return (
        f'<div class="event"><strong>{steps} {_link(event)}: {event.what}</strong>'
        f"<dl>{listed}</dl></div>"
    )


def episode_table(runs: Sequence[RunRecord]) -> str:
    """Return a table of all episodes and rollbacks, whose steps are links into the curves."""
    events = [event for number, run in enumerate(runs) for event in _events(run, number)]
    if not events:
        return ""
    columns = ("Run", *_COLUMNS) if len(runs) > 1 else _COLUMNS
    heads = "".join(f"<th>{title}</th>" for title in columns)
    rows = "".join(_row(event, has_run=len(runs) > 1) for event in events[:_MOST_ROWS])
    left = len(events) - _MOST_ROWS
    rest = f'<p class="note">{left} more, in anomalies.jsonl.</p>' if left > 0 else ""
    return (
        '<h2 id="anomalies">Episodes</h2><p class="note">Bad steps in a row are one episode. Click '
        "its steps to show them in all panels, where each episode is a shaded span, or a frame in "
        "a map.</p>"
        f'<div class="wide{" long" if len(events) > _MANY_ROWS else ""}">'
        '<table id="episodes" class="rows"><thead><tr>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>{rest}"
    )


def _row(event: _Event, *, has_run: bool) -> str:
    run = [("name", "Run", breakable(event.run.name))] * has_run
    told = f"<strong>{event.what}</strong>{_listed(_told(event), empty='')}"
    texts = (
        f"{_link(event)}{_duration(event)}",
        told,
        _listed(event.where, "no single layer"),
        _listed(event.samples),
        event.action,
    )
    kinds = ("steps", "", "name", "name", "name")
    cells = [*run, *zip(kinds, _COLUMNS, texts, strict=True)]
    return "<tr>{}</tr>".format(
        "".join(
            f'<td class="{kind}" data-column="{title}">{text}</td>' for kind, title, text in cells
        )
    )


def _cause(event: _Event) -> str:
    words = f"<strong>{event.cause_words}</strong>" if event.cause_words else ""
    return ": ".join(filter(None, [words, event.explanation]))


def _told(event: _Event) -> list[str]:
    suggestion = [f"What to do: {event.suggestion}"] if event.suggestion else []
    before = [f"Just before: {event.before}"] if event.before else []
    return [f"Cause: {_cause(event)}", *before, *suggestion, *event.lines]


def _link(event: _Event, shown: int | None = None) -> str:
    """Return a link to the curves; its text is `shown`, by default first and last step."""
    steps = str(event.first if shown is None else shown)
    if event.last > event.first and shown is None:
        steps += f"\N{EN DASH}{event.last}"
    span = f'data-run="{event.number}" data-step="{event.first}" data-last="{event.last}"'
    return f'<a href="#loss" {span}>{steps}</a>'


def _duration(event: _Event) -> str:
    span = event.last - event.first + 1
    if span > event.num_steps:
        # The steps between may have been good, or not looked at: weights are sampled.
        found = "was found" if event.num_steps == 1 else "were found"
        return f"<div>{event.num_steps} of {span} steps {found} bad</div>"
    return f"<div>{event.num_steps} bad steps</div>" if event.num_steps > 1 else ""


def _listed(lines: Sequence[str], empty: str = _UNKNOWN) -> str:
    return "".join(f"<div>{each}</div>" for each in lines) or empty


def _events(run: RunRecord, number: int) -> list[_Event]:
    events = [
        *(_of_rollback(run, number, rollback) for rollback in run.rollbacks),
        *(_of_episode(run, number, episode) for episode in run.episodes),
    ]
    ordered = sorted(events, key=lambda event: event.first)
    return [
        event._replace(before=_before(event, ordered[:place]))
        for place, event in enumerate(ordered)
    ]


def _before(event: _Event, earlier: Sequence[_Event]) -> str:
    """Return the last event of another kind before an event that may be its consequence.

    The longer an event lasted, the longer the run takes to recover from it.
    """
    others = [
        each
        for each in earlier
        if each.first < event.first
        and (each.what, each.cause_words) != (event.what, event.cause_words)
    ]
    former = max(others, key=lambda each: each.last, default=None)
    if former is None or event.first - former.last > max(_AFTERMATH, former.last - former.first):
        return ""
    steps = "steps" if former.last > former.first else "step"
    cause = "" if former.cause_words in {"", _NO_CAUSE} else f", {former.cause_words}"
    return f"{steps} {_link(former)}: {former.what}{cause}"


def _of_rollback(run: RunRecord, number: int, rollback: RollbackRecord) -> _Event:
    return _Event(
        run=run,
        number=number,
        first=rollback.first_step,
        last=rollback.last_step,
        num_steps=rollback.last_step - rollback.first_step + 1,
        what=html.escape(kind_words(rollback.kind)),
        explanation=html.escape(rollback.description),
        action=f"went back to {html.escape(rollback.checkpoint)} and left out "
        f"{_counted(len(rollback.rows), 'row')} of the data",
    )


def _of_episode(run: RunRecord, number: int, episode: Episode) -> _Event:
    records, cause = episode.records, episode.cause or _NO_CAUSE
    return _Event(
        run=run,
        number=number,
        first=episode.step,
        last=episode.last_step,
        num_steps=episode.num_steps,
        what=html.escape(kind_words(episode.kind)),
        cause_words=html.escape(_CAUSES.get(cause, cause.replace("_", " "))),
        explanation="; ".join(_escaped(_explanation(record) for record in records)),
        suggestion="; ".join(_escaped(record.get("suggestion") or "" for record in records)),
        lines=_escaped(line for record in records for line in _lines(record)),
        where=[line.replace(".", ".<wbr>") for line in _escaped(_where(records, run))],
        samples=samples_of(records),
        action=html.escape(_action(run, episode)),
    )


def _explanation(record: Mapping[str, Any]) -> str:
    """Return what happened, how it ended for what grows, and whether the loss came back."""
    last, diverged = record.get("latest"), record.get("diverged")
    is_back = record.get("back") is not None
    if is_back:
        diverged = f"the loss was near its former level again at step {record['back']}"
    told = (record.get("explanation"), last and f"at last, {last}", diverged)
    return "; ".join(str(clause) for clause in told if clause)


def kind_words(kind: str) -> str:
    """Return the name of a kind of anomalies in words."""
    return KINDS.get(kind, kind.replace("_", " "))


def _escaped(lines: Iterable[Any]) -> list[str]:
    """Return different lines as HTML, in their order; names between backticks become code."""
    shown = (re.sub("`(.+?)`", r"<code>\1</code>", html.escape(str(line))) for line in lines)
    return [line for line in dict.fromkeys(shown) if line]


def _lines(record: Mapping[str, Any]) -> list[str]:
    """Return the numbers that support the cause."""
    lines = []
    loss = _loss_of(record)
    numbers = [
        *compared("loss", loss, record.get("usual_loss")),
        *compared("global norm", record.get("global_norm"), record.get("usual_global_norm")),
        *compared("learning rate", record.get("learning_rate"), None),
        *compared("loss scale", record.get("loss_scale"), None),
    ]
    if numbers:
        lines.append(f"In step {record['step']}: {', '.join(numbers)}")
    if "since" in record and record.get("kind") in SHIFTS:
        lines.append(f"It shows from step {record['since']} on")
    elif "since" in record:
        lines.append(
            f"Looked for every few steps: it began in step {record['since']} at the earliest"
        )
    for field, words in _EVIDENCE.items():
        # Of gradients, those whose norm is an ordinary one tell nothing.
        found = [
            each
            for each in record.get(field) or ()
            if field != "gradients" or not _is_ordinary(each)
        ]
        if found:
            more = f" and {len(found) - _MOST_NAMES} more" if found[_MOST_NAMES:] else ""
            lines.append(words + ", ".join(map(_named, found[:_MOST_NAMES])) + more)
    if replay := _REPLAYS.get(record.get("replay", "")):
        detail = record.get("replay_detail")
        lines.append(f"Replay: {replay}" + (f" ({detail})" if detail else ""))
    return lines


def _is_ordinary(group: Mapping[str, Any]) -> bool:
    """Tell whether a group of gradients has about its usual norm."""
    norm, usual = to_number(group.get("norm")), to_number(group.get("usual_norm"))
    if norm is None or usual is None:
        return False
    return usual / _ORDINARY < norm < usual * _ORDINARY


_LEVEL = 5
"""Number of losses whose median is a level."""

_WELL_ABOVE = 1.2
"""Smallest ratio of the last level of the loss to the lowest one that is worth telling."""

_LITTLE, _ALMOST_ALL, _FEWEST_NORMS = 0.01, 0.9, 10
"""Share of gradients that is left after clipping if that is almost nothing, share of the steps of a
run in which it is so if the run is odd, and the smallest number of its steps."""

_ORDINARY = 2.0
"""Largest factor between a group's norm and its usual norm that is not worth telling."""

_EVIDENCE = {
    "gradients": "Gradient norms: ",
    "weights": "Norms of weights: ",
    "states": "Norms of the training state: ",
    "moved": "Weights with a large update: ",
    "buffers": "Buffers that became non-finite: ",
}
"""Heading of each list of tensors in a record."""


def _named(tensor: Any) -> str:
    """Return the name of a tensor, with its norm and the norm to compare it with."""
    if not isinstance(tensor, Mapping):
        return str(tensor)
    kind = tensor.get("kind", "")
    name = f"{kind} of {tensor.get('name')}" if kind not in {"", "buffer"} else tensor.get("name")
    before = tensor.get("norm_before", tensor.get("usual_norm"))
    word = "was" if "norm_before" in tensor else "usually"
    return " ".join(compared(str(name), tensor.get("norm"), before, word))


def _loss_of(record: Mapping[str, Any]) -> Any:
    """Return the loss of the first rank at fault."""
    losses, ranks = record.get("losses") or [], record.get("ranks") or [0]
    if type(ranks[0]) is int and ranks[0] < len(losses):
        return losses[ranks[0]]
    return next(iter(losses), None)


def _where(records: Sequence[Mapping[str, Any]], run: RunRecord) -> list[str]:
    """Return layer, tensor, ranks and micro-batch; those of several ranks one after the other."""
    ranks = sorted({rank for record in records for rank in record.get("ranks") or ()})
    if (run.facts.get("hardware") or {}).get("ranks") == 1:
        ranks = []  # the only one
    places = [_place(record) for record in records]
    lines = list(dict.fromkeys(line for place in places for line in place))
    if ranks:
        lines.append(f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}")
    lines += dict.fromkeys(record["device"] for record in records if "device" in record)
    numbers = sorted({record["micro_batch"] for record in records if "micro_batch" in record})
    if numbers:
        many = "es" if len(numbers) > 1 else ""
        lines.append(f"micro-batch{many} {', '.join(map(str, numbers))}")
    return lines


def _place(record: Mapping[str, Any]) -> list[str]:
    layer, name, where = record.get("layer"), record.get("name"), record.get("where")
    lines = [f"layer {layer}"] if layer else []
    if name:
        lines.append(_PLACES.get(where or "", "{}").format(name))
    elif where == "loss":
        lines.append("the loss, all outputs of modules are finite")
    return lines


def _action(run: RunRecord, episode: Episode) -> str:
    """Say which updates were skipped, clipped and applied."""
    if not any("skipped" in record for record in episode.records):
        return _UNKNOWN
    total, skipped = episode.num_steps, episode.num_skipped
    updates = "the update" if total == 1 else f"{skipped} of {total} updates"
    if skipped == total:
        return "skipped the update" if total == 1 else f"skipped all {total} updates"
    if skipped:
        others = "others" if total - skipped > 1 else "other"
        return f"skipped {updates}, applied the {others}"
    norms = run.curves.get("global_norm", Curve())
    limit = run.max_grad_norm or math.inf
    of_steps = zip(norms.steps, norms.values, strict=True)
    is_clipped = any(
        limit < norm < math.inf and episode.step <= step <= episode.last_step
        for step, norm in of_steps
    )
    clip = f", with gradients clipped to {limit:{NUMBER}}" if is_clipped else ""
    return f"applied the update{clip}" if total == 1 else f"applied all updates{clip}"


def _end(run: RunRecord) -> str:
    """Say how a run ended, if it says so itself, at which step, and with which loss or reward."""
    state, last = str(run.facts.get("state") or NOT_ENDED), run.last_step()
    if state == NOT_ENDED:
        end = f"The records end at step {last}"
    elif state == "finished":
        end = f"The training finished at step {last}"
    else:
        was = "was " if state.startswith("stopped") else ""
        end = f"The run {was}{html.escape(state)}"
    # The loss of a training by rewards says little.
    name = REWARD if REWARD in run.curves else "loss"
    curve = run.curves.get(name, Curve())
    if curve.steps:
        end += f", with {name} {curve.values[-1]:{NUMBER}} at step {curve.steps[-1]}"
        end += _lowest(curve) if name == "loss" else ""
    first = _first_skipped(run, last)
    end += "" if first is None else f". All updates from step {first} on were skipped"
    error = run.facts.get("error")
    end += f". Its error: <code>{html.escape(error.removesuffix('.'))}</code>" if error else ""
    return f"{end}{_clipped(run)}."


def _first_skipped(run: RunRecord, last: int) -> int | None:
    """Return the step from which on a run has skipped all updates, if there are several."""
    skips = run.curves.get("consecutive_skips", Curve())
    if skips.steps and skips.steps[-1] == last:
        number = skips.values[-1]
        return last - int(number) + 1 if 1 < number < math.inf else None
    ended = run.episodes[-1] if run.episodes else None
    if ended is None or not 1 < ended.num_steps == ended.num_skipped or ended.last_step != last:
        return None
    return ended.step


def _clipped(run: RunRecord) -> str:
    """Say that clipping has left almost nothing of almost all gradients, if it has."""
    curve, limit = run.curves.get("global_norm", Curve()), run.max_grad_norm
    norms = [norm for norm in curve.values if math.isfinite(norm)]
    if not limit or len(norms) < _FEWEST_NORMS:
        return ""
    number = sum(norm > limit / _LITTLE for norm in norms)
    if number < _ALMOST_ALL * len(norms):
        return ""
    return (
        f". In {number} of {len(norms)} steps, clipping has left less than a hundredth of the "
        f"gradients, whose middle global norm was {statistics.median(norms):{NUMBER}}: look at the "
        "size of the loss, and at the initialization"
    )


def _lowest(losses: Curve) -> str:
    """Say where the loss was lowest, if it ends well above that."""
    levels = [
        statistics.median(losses.values[place - _LEVEL : place])
        for place in range(_LEVEL, len(losses.values) + 1)
    ]
    level = min(filter(math.isfinite, levels), default=math.inf)
    if not levels or not 0 < level * _WELL_ABOVE < levels[-1]:
        return ""
    lowest = min(filter(math.isfinite, losses.values))
    step = losses.steps[losses.values.index(lowest)]
    return f"; it was lowest at step {step}, {lowest:{NUMBER}}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
