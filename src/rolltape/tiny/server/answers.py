"""Write replies as SGLang's JSON: text, ids and `meta_info`, complete or streamed."""

import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltape.records.turn import Finish, LogprobKind
from rolltape.tiny.request import EngineReply, Piece
from rolltape.tiny.sampling import TopLogprob
from rolltape.tiny.server.bodies import PromptRequest
from rolltape.tiny.text import GrowingText, TokenTexts

Json = dict[str, Any]


class SglangAnswer:
    """One prompt's answer: `take` adds pieces of a reply, and at any time it can be written as SGLang would."""

    def __init__(self, wanted: PromptRequest, texts: TokenTexts | None, kind: LogprobKind) -> None:
        self._wanted = wanted
        self._texts = texts
        self._kind = kind
        self._started = time.perf_counter()
        self._growing = None if texts is None else GrowingText(texts, skip_special=wanted.skip_special)
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._tops: list[list[list[Any]]] = []
        self._kept: list[tuple[int, ...]] = []
        self._given_text = self._given_ids = 0

    def is_due(self, piece: Piece) -> bool:
        """Whether to send an event after this piece: for the first id, after each interval, and at the end."""
        count = len(self._ids) - self._given_ids
        return piece.reply is not None or count >= (self._wanted.stream_interval if self._given_ids else 1)

    def whole(self, piece: Piece) -> Json:
        """The answer so far, up to the last piece."""
        self._given_ids = len(self._ids)
        return self._json(piece)

    def delta(self, piece: Piece) -> Json:
        """Only the part that is new since the last event."""
        whole = self._json(piece)
        meta, since = whole["meta_info"], self._given_ids
        for name in ("output_token_logprobs", "output_top_logprobs"):
            if name in meta:
                meta[name] = meta[name][since:]
        text = whole.get("text")
        if text is not None:
            whole["text"] = text[self._given_text :]
            self._given_text = max(self._given_text, len(text))
        self._given_ids = len(self._ids)
        return {**whole, "output_ids": whole["output_ids"][since:]}

    def take(self, piece: Piece) -> None:
        self._ids += piece.ids
        if self._growing is not None:
            self._text += "".join(map(self._growing.add, piece.ids))
        if self._wanted.logprobs:
            values = piece.raw_logprobs if self._kind is LogprobKind.RAW else _after_truncation(piece)
            self._logprobs += [self._triple(value, token) for value, token in zip(values, piece.ids, strict=True)]
            self._tops += [self._triples(top) for top in piece.top_logprobs]
        self._kept += [kept.ids for kept in piece.kept_ids if kept is not None]

    def _json(self, piece: Piece) -> Json:
        reply = piece.reply
        meta: Json = {
            "id": piece.request_id,
            "finish_reason": None if reply is None else finish_reason(reply, self._wanted.sampling.max_tokens),
            "prompt_tokens": len(self._wanted.prompt_ids),
            "weight_version": piece.version,
            "num_retractions": 0,
            "completion_tokens": len(self._ids),
            "cached_tokens": piece.cached_tokens,
        }
        if reply is not None:
            meta["e2e_latency"] = time.perf_counter() - self._started
        if self._wanted.logprobs:
            meta |= self._logprob_fields(reply)
        if self._kept and reply is not None:
            ends = np.cumsum([0, *map(len, self._kept)])
            meta["top_p_token_ids"] = _base64([token for ids in self._kept for token in ids])
            meta["top_p_token_offsets"] = _base64(ends.tolist())
        answer: Json = {"output_ids": list(self._ids), "meta_info": meta}
        return answer if self._texts is None else {"text": self._shown(reply), **answer}

    def _shown(self, reply: EngineReply | None) -> str:
        """The text; while it grows, without a possible beginning of a stop string."""
        if reply is None:
            return self._text[: len(self._text) - held_back(self._text, self._wanted.sampling.stop_strings)]
        assert self._texts is not None
        ids, until = self._ids, None
        if self._wanted.trim_stop and reply.finish is Finish.STOP:
            ids = ids[:-1]
        if self._wanted.trim_stop and reply.finish is Finish.STOP_STRING:
            until = reply.stop_at
        return self._texts.decode(ids, skip_special=self._wanted.skip_special, until=until)

    def _logprob_fields(self, reply: EngineReply | None) -> Json:
        fields: Json = {
            "input_token_logprobs": [] if reply is None else self._prompt_triples(reply),
            "output_token_logprobs": list(self._logprobs),
            "output_token_logprobs_length": len(self._logprobs),
        }
        if self._wanted.sampling.top_logprobs:
            prompt_tops = () if reply is None else reply.prompt_top_logprobs
            fields["input_top_logprobs"] = [self._triples(top) or None for top in prompt_tops]
            fields["output_top_logprobs"] = list(self._tops)
        return fields

    def _prompt_triples(self, reply: EngineReply) -> list[list[Any]]:
        # The first reported token never has a logprob, as in SGLang.
        values = [None, *reply.prompt_logprobs[1:]]
        ids = self._wanted.prompt_ids[self._wanted.logprob_start :]
        return [self._triple(value, token) for value, token in zip(values, ids, strict=False)]

    def _triple(self, value: float | None, token: int) -> list[Any]:
        text = self._texts.decode([token]) if self._wanted.logprob_texts and self._texts is not None else None
        return [value, token, text]

    def _triples(self, top: tuple[TopLogprob, ...]) -> list[list[Any]]:
        raw = self._kind is LogprobKind.RAW
        return [self._triple(entry.raw if raw else entry.tempered, entry.id) for entry in top]


def _after_truncation(piece: Piece) -> Sequence[float]:
    """The logprobs after temperature; if kept ids are reported, among those."""
    if not piece.kept_ids:
        return piece.tempered_logprobs
    shares = [0.0 if kept is None else kept.log_share for kept in piece.kept_ids]
    return [min(value - share, 0.0) for value, share in zip(piece.tempered_logprobs, shares, strict=True)]


def _base64(values: Sequence[int]) -> str:
    return base64.b64encode(np.array(values, np.int32).tobytes()).decode()


def finish_reason(reply: EngineReply, max_tokens: int) -> Json:
    """How a reply ended, in SGLang's form."""
    match reply.finish:
        case Finish.STOP | Finish.STOP_STRING:
            return {"type": "stop", "matched": reply.stopped_by}
        case Finish.LENGTH:
            return {"type": "length", "length": min(max_tokens, len(reply.ids))}
        case Finish.ABORT:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case Finish.ERROR:
            return {"type": "abort", "message": reply.error, "status_code": 500, "err_type": "InternalServerError"}


def held_back(text: str, stop_strings: tuple[str, ...]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stop_strings), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stop_strings):
            return size
    return 0
