"""What becomes of a row: its record as bytes, good or bad, ready for the journal. Knows no engine and no file."""

from __future__ import annotations

from dataclasses import dataclass

from pagedbatch.output.openai_records import openai_record
from pagedbatch.output.records import Record, RecordWriter, encode_record, error_record
from pagedbatch.outputs import RequestOutput
from pagedbatch.row_context import RowContext
from pagedbatch.sequence import Request
from pagedbatch.wording import named


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished row: its number, its record as a line of JSON, and whether it is answered. Errors have no tokens."""

    row: int
    record: bytes
    ok: bool
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


class AnswerWriter:
    """Makes the answers of rows.

    `batch_model` is the name that answers in OpenAI's shape carry; None: such rows are answered as others are.
    """

    def __init__(self, records: RecordWriter, batch_model: str | None) -> None:
        self._records = records
        self._batch_model = batch_model

    def answer(self, context: RowContext, request: Request, output: RequestOutput) -> Answer:
        """The answer of a row that has left the engine."""
        if output.error is not None:
            return self.error(context, f"{context.place}: {output.error}")
        try:
            encoded = self._encode(context, self._records.ok_record(context.id, output, request))
        except Exception as error:  # one answer that can't be written must not cost the others theirs
            problem = named(error)
            return self.error(context, f"{context.place}: its answer can't be written: {problem}")
        return Answer(context.index, encoded, True, output.num_prompt_tokens, output.num_output_tokens)

    def error(self, context: RowContext, message: str) -> Answer:
        """The answer of a row that failed; `message` names its place."""
        return Answer(context.index, self._encode(context, error_record(context.index, context.id, message)), False)

    def _encode(self, context: RowContext, record: Record) -> bytes:
        if context.reply != "plain" and self._batch_model is not None:
            record = openai_record(record, context.reply, self._batch_model)
        return encode_record(record, context.kept)
