"""Writes the table of model types into docs/models.md: `make docs`. The families are those that the tests compare."""

from __future__ import annotations

from pathlib import Path

from encoder_decoder_families import FAMILIES as ENCODER_DECODERS
from families import FAMILIES

PAGE = Path(__file__).resolve().parent / "models.md"
BEGIN, END = "<!-- made by docs/make_models.py -->\n", "<!-- end -->\n"

#: Setting of a family's tiny config -> the feature of its attention or its layers that it switches on.
FEATURES = {
    "sliding_window": "sliding window",
    "attn_logit_softcapping": "soft cap",
    "num_experts": "experts",
    "attention_multiplier": "own scale",
    "query_pre_attn_scalar": "own scale",
    "no_rope_layers": "layers without positions",
}


def families_table() -> str:
    """One line per family that `tests/test_families.py` or `tests/test_encoder_decoder_families.py` compares."""
    lines = ["| model type | also covered |", "| --- | --- |"]
    for family, settings in sorted(FAMILIES.items()):
        features = list(dict.fromkeys(FEATURES[name] for name in settings if name in FEATURES))
        if family == "gpt_oss":
            features.append("sinks")
        lines.append(f"| `{family}` | {', '.join(features)} |")
    lines += [f"| `{family}` | encoder-decoder |" for family in sorted(ENCODER_DECODERS)]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{families_table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
