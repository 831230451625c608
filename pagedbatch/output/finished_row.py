"""What becomes of a row: its record as bytes, good or bad, ready for the journal. Knows no engine and no file."""

from __future__ import annotations

from dataclasses import dataclass

from pagedbatch.input.openai_batch import answer
from pagedbatch.input.prefetch import Ticket
from pagedbatch.output.records import Record, RecordWriter, encode_record, error_record
from pagedbatch.outputs import RequestOutput
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

    def answer(self, ticket: Ticket, request: Request, output: RequestOutput) -> Answer:
        """The answer of a row that has left the engine."""
        if output.error is not None:
            return self.error(ticket, f"{ticket.place}: {output.error}")
        try:
            encoded = self._encode(ticket, self._records.ok_record(ticket.id, output, request))
        except Exception as error:  # one answer that can't be written must not cost the others theirs
            problem = named(error)
            return self.error(ticket, f"{ticket.place}: its answer can't be written: {problem}")
        return Answer(ticket.index, encoded, True, output.num_prompt_tokens, output.num_output_tokens)

    def error(self, ticket: Ticket, message: str) -> Answer:
        """The answer of a row that failed; `message` names its place."""
        return Answer(ticket.index, self._encode(ticket, error_record(ticket.index, ticket.id, message)), False)

    def _encode(self, ticket: Ticket, record: Record) -> bytes:
        if ticket.from_batch and self._batch_model is not None:
            record = answer(record, ticket.url, self._batch_model)
        return encode_record(record, ticket.kept)
