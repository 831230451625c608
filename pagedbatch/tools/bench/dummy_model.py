"""A model made from a config alone, with random weights: to size a machine for a model that isn't there."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from pagedbatch.errors import UsageError
from pagedbatch.model.hf_config import load_config
from pagedbatch.model.model_config import check_supported, num_parameters
from pagedbatch.model.tokenizer import load_tokenizer
from pagedbatch.wording import size

#: A folder has a tokenizer if it has one of these files.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


def readable_config(source: str, folder: Path) -> str:
    """Where the config can be loaded from: `source`, or `folder` with a copy of it, if it is a file of another name.

    Raises:
        UsageError: there is no such file.
    """
    path = Path(source).expanduser()
    if path.suffix.lower() != ".json":
        return source
    if not path.is_file():
        raise UsageError(f"model {source!r}: no such file")
    if path.name == "config.json":
        return str(path.parent)
    folder.mkdir()
    shutil.copyfile(path, folder / "config.json")
    return str(folder)


def make_dummy_model(source: str, folder: Path, dtype: torch.dtype) -> bool:
    """Saves a model with the config of `source`, a folder or a Hub id, and random weights, and a tokenizer.

    If `source` has no tokenizer, one is made in which every token is a word. Returns whether it had one.

    Raises:
        UsageError: no such config, a model that can't run here, or no room for its weights.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(source)
    check_supported(config)
    folder.mkdir()
    num_bytes = num_parameters(config) * dtype.itemsize
    _check_room("memory", num_bytes, psutil.virtual_memory().available)
    _check_room(f"{folder.parent} (TMPDIR chooses)", num_bytes, shutil.disk_usage(folder).free)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer = _own_tokenizer(source)
    (tokenizer or _word_tokenizer(config.vocab_size)).save_pretrained(folder)
    return tokenizer is not None


def dummy_prompts(count: int, length: int, vocab_size: int) -> list[dict[str, Any]]:
    """`count` prompts of `length` random token ids, always the same; they have no common prefix to share."""
    draw = random.Random(0)
    return [{"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(length)]} for _ in range(count)]


def _check_room(where: str, num_bytes: int, free: int) -> None:
    if num_bytes > free:
        raise UsageError(f"--dummy-weights: the weights take {size(num_bytes)}, and free is {size(free)} of {where}")


def _own_tokenizer(source: str) -> Any:
    path = Path(source).expanduser()
    if path.is_dir():
        return load_tokenizer(source) if any((path / name).is_file() for name in _TOKENIZER_FILES) else None
    try:
        return load_tokenizer(source)
    except UsageError:
        return None


def _word_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)
