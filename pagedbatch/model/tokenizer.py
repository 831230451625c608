"""Loads a model's tokenizer: checks its files first, and turns whatever transformers fails on into one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pagedbatch.errors import UsageError
from pagedbatch.model.config_check import is_integer
from pagedbatch.model.hf_config import whole_config
from pagedbatch.model.library_errors import is_installed, one_line_errors, quiet, without_rust_notes
from pagedbatch.model.model_files import (
    ModelSource,
    broken,
    find_model,
    first_bytes,
    read_object,
    refuse_pointer,
    shown,
)

_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_OTHERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "merges.txt", "vocab.txt", "tekken.json")
_SENTENCEPIECE = tuple(name for name in _OTHERS if name.endswith(".model"))
_TEXTS = ("chat_template.jinja",)


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer, after a test that it encodes and decodes.

    Raises:
        UsageError: there is no such model, it has no tokenizer, or a broken one.
    """
    source = find_model(model)
    try:
        return _checked_tokenizer(source, trust_remote_code=trust_remote_code)
    except UsageError:
        whole_config(source, trust_remote_code=trust_remote_code)  # the library reads it first; it may be to blame
        raise


def _checked_tokenizer(source: ModelSource, *, trust_remote_code: bool) -> Any:
    if source.folder is not None:
        _check_files(source.folder)
    if source.gguf is None:
        _check_settings(source)
    tokenizer = _from_library(source, trust_remote_code=trust_remote_code)
    file = source.file("tokenizer.json")
    which = "" if file is None else f", {file},"
    with one_line_errors(f"model {source.name!r}: its tokenizer{which} is broken"), quiet(), without_rust_notes():
        # Some mistakes in its files only show when it is used, and would fail every row.
        tokenizer.decode(tokenizer("a b")["input_ids"][:1], skip_special_tokens=True)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token_id = getattr(tokenizer, name)
            if token_id is not None and not is_integer(token_id):
                raise UsageError(f"model {source.name!r}: its tokenizer's {name} is no token id: {shown(token_id)}")
        len(tokenizer)
    template = tokenizer.chat_template
    if template is not None and not isinstance(template, (str, dict)):
        raise UsageError(f"model {source.name!r}: its tokenizer's chat_template must be a text, got {shown(template)}")
    return tokenizer


def _check_files(folder: Path) -> None:
    present = [name for name in (*_JSON, *_OTHERS) if (folder / name).exists()]
    if not present and not any("token" in path.name for path in folder.iterdir()):
        raise UsageError(
            f"model {str(folder)!r} can't be loaded: it has no tokenizer files (tokenizer.json, tokenizer.model or "
            "vocab.json): copy them from where the model comes from"
        )
    for name in present:
        if name in _JSON:
            read_object(folder / name)
            continue
        beginning = first_bytes(folder / name)
        refuse_pointer(folder / name, beginning)
        if not beginning:
            raise broken(folder / name, "it is empty: download it again")
    for name in _TEXTS:
        if (folder / name).exists():
            _check_text(folder / name)


def _check_text(path: Path) -> None:
    refuse_pointer(path, first_bytes(path))
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise broken(path, f"it is not UTF-8 text: byte {error.start} is none") from None


def _check_settings(source: ModelSource) -> None:
    """Checks the keys of tokenizer_config.json that are used here."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = source.json_object(name) or {}
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = settings.get(key)
            content = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(content, str):
                raise UsageError(
                    f"{source.file(name)}: {key} must be a text or an object with a content, got {shown(token)}"
                )


def _from_library(source: ModelSource, *, trust_remote_code: bool) -> Any:
    try:
        with one_line_errors("the library says"), quiet(), without_rust_notes():
            return AutoTokenizer.from_pretrained(**source.arguments, trust_remote_code=trust_remote_code)
    except UsageError as error:
        raise UsageError(_reason(source, error)) from error


def _reason(source: ModelSource, error: UsageError) -> str:
    """One line for a tokenizer that can't be loaded, naming the file at fault as far as that is known."""
    beginning = f"model {source.name!r}: its tokenizer can't be loaded"
    folder = source.folder
    if folder is None:
        return f"{beginning}: {error}"
    fast = folder / "tokenizer.json"
    if fast.is_file():
        return f"{beginning}: {_blame(fast)}: {error}"
    sentencepiece = next((name for name in _SENTENCEPIECE if (folder / name).is_file()), None)
    if sentencepiece is not None:
        packages = [name for name, module in (("sentencepiece", "sentencepiece"), ("protobuf", "google.protobuf"))
                    if not is_installed(module)]  # fmt: skip
        if packages:
            return f"{beginning}: its {sentencepiece} needs a package: pip install {' '.join(packages)}"
        return f"{beginning}: {folder / sentencepiece}: {error}"
    there = ", ".join(sorted(path.name for path in folder.iterdir() if "token" in path.name or path.name in _OTHERS))
    return f"{beginning}: there is no tokenizer.json and no tokenizer.model, only {there or 'vocab.json'}: {error}"


def _blame(fast: Path) -> Path | str:
    """tokenizer.json if it is broken by itself, else the files beside it."""
    from tokenizers import Tokenizer

    try:
        with one_line_errors(str(fast)), without_rust_notes():
            Tokenizer.from_file(str(fast))
    except UsageError:
        return fast
    return f"{fast.parent / 'tokenizer_config.json'} or a file beside it"
