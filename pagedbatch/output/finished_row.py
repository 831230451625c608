"""A finished row: its record, ok or error, encoded for the journal."""

from __future__ import annotations

from dataclasses import dataclass

from pagedbatch.output.openai_records import openai_record
from pagedbatch.output.records import Record, RecordWriter, encode_record, error_record
from pagedbatch.outputs import RequestOutput
from pagedbatch.row_context import RowContext
from pagedbatch.sequence import Request
from pagedbatch.wording import named


@dataclass(frozen=True, slots=True)
class FinishedRow:
    """`record` is a line of JSON. The token counts of an error row are 0."""

    index: int
    record: bytes
    ok: bool
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRowWriter:
    """Encodes the records of finished rows.

    `openai_model` is the model's name in records in OpenAI's format; None writes every record in ours.
    """

    records: RecordWriter
    openai_model: str | None

    def finish(self, context: RowContext, request: Request, output: RequestOutput) -> FinishedRow:
        """A row that has left the engine."""
        if output.error is not None:
            return self.fail(context, f"{context.place}: {output.error}")
        try:
            encoded = self._encode(context, self.records.ok_record(context.id, output, request))
        except Exception as error:  # one record that can't be written must not cost the others theirs
            return self.fail(context, f"{context.place}: its record can't be written: {named(error)}")
        return FinishedRow(context.index, encoded, True, output.num_prompt_tokens, output.num_output_tokens)

    def fail(self, context: RowContext, message: str) -> FinishedRow:
        """A row that ended in an error. `message` says where the row is."""
        return FinishedRow(
            context.index, self._encode(context, error_record(context.index, context.id, message)), False
        )

    def _encode(self, context: RowContext, record: Record) -> bytes:
        if context.reply != "plain" and self.openai_model is not None:
            record = openai_record(record, context.reply, self.openai_model)
        return encode_record(record, context.kept)
