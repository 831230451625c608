"""Checks from a model's files, without reading weights, whether it runs here: for `pagedbatch doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pagedbatch.errors import UsageError
from pagedbatch.model.checkpoint import check_folder, check_tensors, checkpoint_tensors
from pagedbatch.model.hf_config import text_config, whole_config
from pagedbatch.model.model_config import ModelConfig, unsupported_reason
from pagedbatch.model.model_defaults import model_defaults
from pagedbatch.model.model_files import ModelSource, find_model
from pagedbatch.model.quantization import quantization_method, quantization_of, quantization_problem
from pagedbatch.model.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Inspection:
    """`problems` is everything that prevents a run; if empty, the model runs here.

    `config` is None for a model of a type that is not supported. `weights` and `quantisation` describe them in words;
    None: there are no weights here, and the checkpoint is not quantised.
    """

    model_type: str
    problems: tuple[str, ...]
    config: ModelConfig | None = None
    weights: str | None = None
    quantisation: str | None = None


def inspect_model(model: str, *, trust_remote_code: bool = False) -> Inspection:
    """Checks all of a model's files.

    Raises:
        UsageError: there is no such model, or its config is broken.
    """
    source = find_model(model)
    config = whole_config(source, trust_remote_code=trust_remote_code)
    text = text_config(config)
    reason = unsupported_reason(text)
    if reason is not None:
        return Inspection(text.model_type, (reason,))
    settings = quantization_of(config)
    quantisation_reason = quantization_problem(config)
    checks: list[Callable[[], object]] = [
        lambda: check_folder(source, ignore_adapter=False),
        lambda: _check_weights(source, config, can_build=quantisation_reason is None),
        lambda: load_tokenizer(model, trust_remote_code=trust_remote_code),
        lambda: model_defaults(model, trust_remote_code=trust_remote_code, ignore_adapter=True),
    ]
    problems = [*([] if quantisation_reason is None else [quantisation_reason]), *_problems(checks)]
    return Inspection(
        model_type=text.model_type,
        problems=tuple(problems),
        config=ModelConfig.from_hf(text),
        weights=_weights(source, config),
        quantisation=None if settings is None else str(quantization_method(settings)),
    )


def _problems(checks: list[Callable[[], object]]) -> Iterator[str]:
    for check in checks:
        try:
            check()
        except UsageError as error:
            yield str(error)


def _check_weights(source: ModelSource, config: Any, *, can_build: bool) -> None:
    tensors = checkpoint_tensors(source, config, needed=False)
    if tensors is not None and can_build:
        check_tensors(source, config, tensors)


def _weights(source: ModelSource, config: Any) -> str | None:
    """In words; None if they can't be read, or are not here."""
    try:
        tensors = checkpoint_tensors(source, config, needed=False)
    except UsageError:  # reported as a problem
        return None
    if tensors is None:
        return None if source.gguf is None else "in GGUF, not looked at"
    files = {tensor.file for tensor in tensors.values()}
    return f"{len(tensors)} tensors in {len(files)} {'file' if len(files) == 1 else 'files'}"
