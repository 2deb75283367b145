"""Prints a token record by token or by turn, and the tokens with the largest values of a column."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.cli.output.screen import count, number, plural, print_json, print_line, print_table
from rolltape.cli.train.token_join import JoinedRecord, RecordJoiner
from rolltape.records.sample import Origin, Span
from rolltape.records.token_record import TokenRecord
from rolltape.samples.spelling import Spell, token_texts
from rolltape.tokens.files import read_step
from rolltape.tokens.steps import TokenStep
from rolltape.tokens.summary import ColumnStats, TokenOutlier, largest_tokens

_AROUND = 6  # tokens on each side


def print_record(record: TokenRecord, joiner: RecordJoiner, columns: Sequence[str], *, as_json: bool) -> None:
    """Print a line per token, with the values of the columns."""
    joined = joiner.joined(record)
    held = record.columns()
    if as_json:
        print_json({**_about(joined), **{name: _plain(held.get(name)) for name in ("ids", "trained_mask", *columns)}})
        return
    _print_title(record)
    texts = token_texts(record.ids.tolist(), joined.spell)
    rows = [
        [
            count(at),
            _turn(joined.span_at(at)),
            _marked(text, trained),
            *(_cell(held.get(name), at) for name in columns),
        ]
        for at, (text, trained) in enumerate(zip(texts, record.trained_mask.tolist(), strict=True))
    ]
    print_table(["at", "turn", "token", *columns], rows, left=["turn", "token"], flexible=["token"])


def print_turns(record: TokenRecord, joiner: RecordJoiner, *, as_json: bool) -> None:
    """Print a line per prompt and reply of a record: its messages, and figures of its trained tokens."""
    joined = joiner.joined(record)
    spans = _join_replies(joined.spans)
    parts = [_part(joined, span) for span in spans]
    if as_json:
        print_json({**_about(joined), "stretches": parts})
        return
    _print_title(record)
    figures = ("mismatch_kl", "masked", "entropy")
    print_table(
        ["turn", "tokens", "trained", *figures, "message"],
        [
            [
                _turn(span),
                f"{span.start}-{span.stop}",
                count(part["trained_tokens"]),
                *(number(part[name]) for name in figures),
                joined.summary_of(span),
            ]
            for span, part in zip(spans, parts, strict=True)
        ],
        left=["turn", "message"],
        flexible=["message"],
    )


def print_worst(
    steps: Sequence[TokenStep], rank: int | None, joiner: RecordJoiner, *, by: str, limit: int, as_json: bool
) -> None:
    """Print the tokens with the largest values of a column, with the text around them."""
    columns = {by, "inference_logprobs", "mismatch_kl", "ratio"}
    found = largest_tokens((record for step in steps for record in read_step(step, rank, columns)), by, limit)
    rows = []
    for one in found:
        joined = joiner.joined(one.record)
        span = joined.span_at(one.at)
        if as_json:
            print_json(_outlier(one, joined, span, by))
            continue
        rows.append(
            [
                one.record.place,
                count(one.at),
                _turn(span),
                _probability(one.record.inference_logprobs, one.at),
                _probability(one.record.trainer_logprobs, one.at),
                number(one.value),
                _around(one.record, one.at, joined.spell),
                "" if span is None else joined.summary_of(span),
            ]
        )
    if not as_json:
        names = ["record", "at", "turn", "inference", "trainer", by, "text around", "message"]
        flexible = ["text around", "message"]
        print_table(names, rows, left=["record", "turn", *flexible], flexible=flexible, spare=["message"])
        print_line(f"{plural(len(found), 'trained token')} with the largest {by}")


def _join_replies(spans: Sequence[Span]) -> list[Span]:
    """The spans with those of one reply joined, whatever the fates of its tokens."""
    whole: list[Span] = []
    for span in spans:
        last = whole[-1] if whole else None
        if last is not None and (last.turn, last.origin, last.messages) == (span.turn, span.origin, span.messages):
            whole[-1] = msgspec.structs.replace(last, stop=span.stop)
        else:
            whole.append(span)
    return whole


def _part(joined: JoinedRecord, span: Span) -> dict[str, Any]:
    part = slice(span.start, span.stop)
    trained = joined.record.trained_mask[part]
    held = joined.record.columns()
    means = {
        name: ColumnStats(held[name][part][trained]).mean if name in held else None
        for name in ("mismatch_kl", "masked", "masked_high", "masked_low", "entropy")
    }
    return {
        "turn": span.turn,
        "origin": span.origin,
        "start": span.start,
        "stop": span.stop,
        "trained_tokens": int(trained.sum()),
        **means,
        "messages": [
            message.to_dict() for message in joined.turns[span.turn].messages.to_list()[slice(*span.messages)]
        ],
    }


def _outlier(one: TokenOutlier, joined: JoinedRecord, span: Span | None, by: str) -> dict[str, Any]:
    record = one.record
    first = max(one.at - _AROUND, 0)
    return {
        **_about(joined),
        "at": one.at,
        "id": int(record.ids[one.at]),
        by: one.value,
        "trainer_logprob": float(record.trainer_logprobs[one.at]),
        "inference_logprob": None if record.inference_logprobs is None else float(record.inference_logprobs[one.at]),
        "turn": None if span is None else span.turn,
        "turn_offset": None if span is None else span.turn_start + one.at - span.start,
        "message": None if span is None else joined.summary_of(span),
        "first_around": first,
        "ids_around": record.ids[first : one.at + _AROUND + 1].tolist(),
        "text_around": _around(record, one.at, joined.spell),
    }


def _about(joined: JoinedRecord) -> dict[str, Any]:
    record = joined.record
    return {"record": record.place, "step": record.step, "sample": record.sample, "rollout": record.rollout}


def _print_title(record: TokenRecord) -> None:
    reward = "" if record.reward is None else f", reward {number(record.reward)}"
    whose = "" if record.sample is None else f", sample {record.sample}"
    print_line(
        f"record {record.place}: {plural(len(record), 'token')}, {record.trained_tokens:,} trained{reward}{whose}",
        style="bold",
    )


def _around(record: TokenRecord, at: int, spell: Spell | None) -> str:
    first, last = max(at - _AROUND, 0), min(at + _AROUND + 1, len(record))
    texts = token_texts(record.ids[first:last].tolist(), spell)
    shown = [_marked(text, first + place == at) for place, text in enumerate(texts)]
    return f"{'… ' if first else ''}{' '.join(shown)}{' …' if last < len(record) else ''}"


def _marked(text: str, marked: bool) -> str:
    spelled = text.replace(" ", "␣")
    return f"«{spelled}»" if marked else spelled


def _turn(span: Span | None) -> str:
    if span is None:
        return ""
    session, turn = span.turn.rsplit(".", 2)[1:]
    return f"{session}.{turn}{' prompt' if span.origin is Origin.PROMPT else ''}"


def _cell(values: Any, at: int) -> str:
    if values is None:
        return ""
    value = values[at]
    return ("yes" if value else "") if values.dtype == np.bool_ else number(value.item())


def _probability(logprobs: Any, at: int) -> str:
    return "" if logprobs is None else f"{np.exp(np.float64(logprobs[at])):.4f}"


def _plain(values: Any) -> Any:
    return None if values is None else values.tolist()
