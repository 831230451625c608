"""The maximum length of a sequence: from a model's config and its RoPE scaling, or as asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedbatch.errors import UsageError

#: Types whose positions are looked up in a table of `max_position_embeddings` entries.
_POSITION_TABLES = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gptj", "opt"),
        *("bart", "blenderbot", "m2m_100", "marian", "mbart", "pegasus", "plbart"),
    }
)
#: T5 has no limit of its own: distances beyond its buckets count as the last one. It was trained on this length.
_T5_LENGTH = 512
#: Scalings that change with the longest sequence of a batch.
_BATCH_DEPENDENT = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class ContextLength:
    """`tokens` is the maximum length, prompt included; `why` explains it if it is not simply the config's.

    `ceiling` says why it can't be raised, None if it can.
    """

    tokens: int
    why: str | None = None
    ceiling: str | None = None

    def max_model_len(self, asked: int | None = None) -> int:
        """The maximum number of tokens of a sequence in a run: as asked, else as the config says.

        Raises:
            UsageError: what is asked is more than this model can do here.
        """
        if asked is None:
            return self.tokens
        if asked > self.tokens and self.ceiling is not None:
            raise UsageError(f"--max-model-len {asked}: this model's limit is {self.tokens} tokens, as {self.ceiling}")
        return asked


def context_length(config: Any) -> ContextLength:
    """The length that a model was made for, from its (text) config.

    Configs write YaRN and linear scaling in two ways: `max_position_embeddings` is the length before scaling, or after.
    The scaled length is the original length times the factor in both. Only YaRN and Llama 3 always name the original
    length; linear scaling is documented to leave `max_position_embeddings` unscaled. Llama 3's factor counts only if
    the two lengths are equal: the factors of published models don't give the scaled length.

    "dynamic" and "longrope" change with the longest sequence of a batch, which would make a row depend on the others.
    Up to the original length they don't, so such a model is limited to that.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return ContextLength(int(getattr(config, "n_positions", None) or _T5_LENGTH))
    longest = int(longest)
    if config.model_type in _POSITION_TABLES:
        return ContextLength(longest, ceiling=f"its positions are a table of {longest} entries")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if kind in _BATCH_DEPENDENT:
        kept = min(longest, int(original)) if original else longest
        ceiling = f"its rotary scaling, {kind!r}, would make a row depend on the others of its batch beyond that"
        return ContextLength(kept, f"{kind} rotary scaling keeps to the original length", ceiling)
    if kind in ("yarn", "linear", "llama3"):
        scaled = _scaled(kind, longest, original, rope.get("factor"))
        if scaled > longest:
            return ContextLength(scaled, f"{original or longest} scaled by {rope['factor']:g} ({kind})")
    return ContextLength(longest)


def _scaled(kind: str, longest: int, original: int | None, factor: float | None) -> int:
    if not factor or (kind == "llama3" and original != longest):
        return longest
    return round((original or longest) * factor)
