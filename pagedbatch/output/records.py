"""The records of OUT.jsonl, for rows that are ok and rows that are errors."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pagedbatch.engine.stopping import LENGTH, find_stop_string
from pagedbatch.output.reasoning import split_reasoning
from pagedbatch.output.repetition import num_repeated_tokens
from pagedbatch.outputs import CompletionOutput, RequestOutput
from pagedbatch.params import GenerationParams
from pagedbatch.row_context import RowId
from pagedbatch.sequence import Request, Thinking
from pagedbatch.step import PromptScores, TopLogprobs
from pagedbatch.token_bytes import TokenBytes

Record = dict[str, Any]

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

#: What decoders show for bytes that make no character.
_MARK = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def encode_record(record: Mapping[str, Any], kept: bytes | None = None) -> bytes:
    """A record as one line of strict JSON, without its line end; `kept` is the JSON of its key `input`."""
    encoded = _ENCODER.encode(record).encode(errors="replace")
    return encoded if kept is None else b'%b, "input": %b}' % (encoded[:-1], kept)


def error_record(index: int, row_id: RowId | None, message: str) -> Record:
    """The record of a row that failed."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
    return {"id": row_id, "index": index, "status": "error", "outputs": [], "usage": usage, "error": message}


def _mark_loops(outputs: list[Record]) -> None:
    """`repeated_tokens` in outputs that end in a loop; an end token may follow it."""
    for output in outputs:
        token_ids = output["token_ids"]
        num_repeated = num_repeated_tokens(token_ids[:-1] if output["finish_reason"] == "stop" else token_ids)
        if num_repeated:
            output["repeated_tokens"] = num_repeated


class RecordWriter:
    """Turns finished requests into records, with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)

    def ok_record(self, row_id: RowId | None, output: RequestOutput, request: Request) -> Record:
        """The record of a row that is ok.

        It has `prompt_logprobs` if the row asked for them, `truncated_tokens` in its usage if its prompt was cut, a
        `note` if it has fewer outputs than it asked for, and `reasoning` beside the text of each output if the chat
        template marks a thinking part.
        """
        params = request.params
        outputs = [self._completion(completion, params) for completion in output.outputs]
        if request.source_token_ids:
            _mark_loops(outputs)
        record: Record = {
            "id": row_id,
            "index": output.request_id,
            "status": "ok",
            "outputs": outputs,
            "usage": {
                "prompt_tokens": output.num_prompt_tokens,
                "completion_tokens": output.num_output_tokens,
                "cached_tokens": output.num_cached_tokens,
            },
            "error": None,
        }
        if request.thinking is not None:
            record["usage"]["reasoning_tokens"] = sum(
                self._split_off_reasoning(written, params, request.thinking) for written in record["outputs"]
            )
        if request.num_truncated_tokens:
            record["usage"]["truncated_tokens"] = request.num_truncated_tokens
        if output.prompt_scores is not None:
            record["prompt_logprobs"] = self._prompt_logprobs(request.prompt_token_ids, output.prompt_scores)
        if len(output.outputs) < params.n:
            reason = (
                "no more are possible" if params.num_beam_groups == 1 else "the groups of beams found no other ones"
            )
            record["note"] = f"only {len(output.outputs)} of {params.n} outputs: {reason}"
        return record

    def _prompt_logprobs(self, token_ids: list[int], scores: PromptScores) -> list[Record | None]:
        """One entry per prompt token; null for the first, which has nothing before it."""
        pieces = [(self._token_bytes.literal(token_id, False), False) for token_id in token_ids[1:]]
        return [None, *self._scored(token_ids[1:], scores.logprobs, scores.top_logprobs, pieces, False)]

    def _completion(self, completion: CompletionOutput, params: GenerationParams) -> Record:
        return {
            "index": completion.index,
            "text": self._text(completion, params),
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "cumulative_logprob": _finite(completion.cumulative_logprob),
            "score": _finite(completion.score),
            "logprobs": self._logprobs(completion, params.skip_special_tokens),
        }

    def _split_off_reasoning(self, written: Record, params: GenerationParams, thinking: Thinking) -> int:
        """Moves the thinking part of an output's text to `reasoning`. Returns its number of tokens."""
        split = split_reasoning(
            written["text"], written["token_ids"], thinking, self._token_bytes, self._decode, params.skip_special_tokens
        )
        written["text"], written["reasoning"] = split.answer, split.reasoning
        return split.num_tokens

    def _text(self, completion: CompletionOutput, params: GenerationParams) -> str:
        text = self._decode(completion.token_ids, params.skip_special_tokens)
        if isinstance(completion.stop_reason, str):
            found = find_stop_string(params, completion.token_ids, self._decode)
            if found is not None:
                start, stop_string = found
                text = text[: start + len(stop_string)] if params.include_stop else text[:start]
        if completion.finish_reason == LENGTH.reason and text.endswith(_MARK):
            num_cut = self._num_tokens_of_half_a_character(completion.token_ids)
            if num_cut:
                text = self._decode(completion.token_ids[:-num_cut], params.skip_special_tokens) + _MARK
        return text

    def _num_tokens_of_half_a_character(self, token_ids: list[int]) -> int:
        """How many tokens at the end, each one byte as in `<0xF0>`, begin a character that the length limit cut.

        Decoders of such vocabularies show a mark for each byte, and for the whole characters before these too.
        """
        # An id beyond the tokenizer's has no name.
        tokens = self._tokenizer.convert_ids_to_tokens(token_ids[-3:])
        names = [token and _BYTE_TOKEN.fullmatch(token) for token in tokens]
        for size in (3, 2, 1):
            tail = bytes(int(name[1], 16) for name in names[-size:] if name)
            if len(tail) == size and _is_half_a_character(tail):
                return size
        return 0

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _logprobs(self, completion: CompletionOutput, skip_special_tokens: bool) -> list[Record] | None:
        if completion.top_logprobs is None:
            return None
        token_ids = completion.token_ids
        pieces = self._token_bytes.of_output(token_ids, skip_special_tokens=skip_special_tokens)
        return self._scored(token_ids, completion.token_logprobs, completion.top_logprobs, pieces, skip_special_tokens)

    def _scored(
        self,
        token_ids: list[int],
        logprobs: list[float],
        tops: list[TopLogprobs],
        pieces: list[tuple[bytes, bool]],
        skip_special_tokens: bool,
    ) -> list[Record]:
        """One entry per token. `pieces`: what each adds to the text, and whether it is first there."""
        return [
            {
                **self._token(token_id, logprob, first, piece),
                "top_logprobs": [self._alternative(*entry, first, skip_special_tokens) for entry in top],
            }
            for token_id, logprob, top, (piece, first) in zip(token_ids, logprobs, tops, pieces, strict=True)
        ]

    def _alternative(self, token_id: int, logprob: float, first: bool, skip_special_tokens: bool) -> Record:
        piece = self._token_bytes.shown(token_id, first=first, skip_special_tokens=skip_special_tokens)
        return self._token(token_id, logprob, first, piece)

    def _token(self, token_id: int, logprob: float, first: bool, piece: bytes) -> Record:
        """`bytes` is there if it differs from the token's text: parts of characters, tokens that aren't shown."""
        text = self._token_bytes.literal(token_id, first).decode(errors="replace")
        entry: Record = {"token_id": token_id, "token": text, "logprob": _finite(logprob)}
        if piece != text.encode():
            entry["bytes"] = list(piece)
        return entry


def _is_half_a_character(data: bytes) -> bool:
    """Whether more bytes could make `data` one character."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data) == ""
    except UnicodeDecodeError:
        return False


def _finite(value: float | None) -> float | None:
    """JSON has no infinities: the logprob of a token that a filter ruled out is null."""
    return value if value is not None and math.isfinite(value) else None
