"""A model from a config alone, with random weights: to size a machine for a model that isn't there. Knows no prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedbatch.errors import UsageError


def make_dummy_model(source: str, folder: Path, dtype: str) -> int:
    """Saves a model of the config at `source` with random weights, as safetensors, and a tokenizer.

    Args:
        source: a config.json, or a folder or Hub id that holds one; its own tokenizer is kept where it has one, else
            every token is a word of its own.
        dtype: of the weights: "float32", "bfloat16" or "float16".

    Returns:
        The size of its vocabulary.

    Raises:
        UsageError: there is no such config, or this engine can't run such a model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from pagedbatch.model.loader import load_config, load_tokenizer
    from pagedbatch.model.support import check_supported

    path = Path(source)
    config = load_config(str(path.parent) if path.suffix == ".json" else source)
    check_supported(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    try:
        load_tokenizer(source).save_pretrained(folder)
    except UsageError:
        _save_word_tokenizer(config, folder)
    return int(config.vocab_size)


def _save_word_tokenizer(config: Any, folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def dummy_prompts(count: int, length: int, vocab_size: int) -> list[dict[str, Any]]:
    """`count` prompts of `length` random token ids, always the same."""
    import random

    rng = random.Random(0)
    return [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(length)]} for _ in range(count)]
