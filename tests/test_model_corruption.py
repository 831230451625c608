"""Random corruptions of a model's files: it answers, or is refused with one line; never anything else.

HYPOTHESIS_PROFILE=thorough tries a thousand.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_folders import load_all

from pagedbatch.config import EngineConfig
from pagedbatch.engine.engine import Engine
from pagedbatch.errors import UsageError
from pagedbatch.model.runner import ModelRunner
from pagedbatch.params import GenerationParams
from pagedbatch.sequence import Request

NUM_EXAMPLES = examples(40)
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
FILES = (*JSON_FILES, "model.safetensors", "model.safetensors.index.json", "special_tokens_map.json")
#: Keys that the files may lack, and that are read where they are there.
MORE_KEYS = (
    "rope_scaling", "rope_theta", "sliding_window", "layer_types", "text_config", "quantization_config", "torch_dtype",
    "auto_map", "partial_rotary_factor", "eos_token_id", "do_sample", "temperature", "top_k", "num_beams", "max_length",
    "max_new_tokens", "stop_strings", "bad_words_ids", "chat_template", "added_tokens_decoder", "model_max_length",
)  # fmt: skip
KEYS = st.sampled_from(("type", "rope_type", "factor", "quant_method", "weight_map", "content", "x"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([10**6, 10**9, 2**31, 2**64, -(2**70), 64.0, 0.0, -1.0, 1e-9, 1e308, float("nan"), float("inf")])
    | st.sampled_from(["", "a", "2", "yarn", "linear", "longrope", "llama3", "silu", "float16", "fp8", "\x1b[31m"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def folder(rand_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrupted") / "model"


def answers(path: Path) -> None:
    """Loads all of a model, and lets it write two tokens."""
    loaded = load_all(path)
    engine = Engine(EngineConfig(num_blocks=8), ModelRunner.create(loaded, attention="torch", num_blocks=8))
    engine.add(Request(0, [1, 50, 60], GenerationParams(max_tokens=2)))
    while engine.has_unfinished:
        engine.step()


def answers_or_is_refused(path: Path) -> None:
    try:
        answers(path)
    except UsageError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert "Traceback" not in message


def fresh(source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


def corrupt_value(data: st.DataObject, value: Any) -> Any:
    """The same with something else in some place of it."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from([*sorted(value), *MORE_KEYS]))
        if key in value and not data.draw(st.integers(0, 3)):
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: corrupt_value(data, value.get(key))}
    if isinstance(value, list) and value and data.draw(st.integers(0, 2)):
        index = data.draw(st.integers(0, len(value) - 1))
        return [*value[:index], corrupt_value(data, value[index]), *value[index + 1 :]]
    return data.draw(VALUES)


EXAMPLES = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=NUM_EXAMPLES <= 40,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example],
)


@EXAMPLES
@given(data=st.data(), name=st.sampled_from(JSON_FILES))
def test_values(rand_model_path: Path, folder: Path, data: st.DataObject, name: str) -> None:
    fresh(rand_model_path, folder)
    table = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(corrupt_value(data, table)))
    answers_or_is_refused(folder)


@EXAMPLES
@given(data=st.data(), name=st.sampled_from(FILES))
def test_bytes(rand_model_path: Path, folder: Path, data: st.DataObject, name: str) -> None:
    fresh(rand_model_path, folder)
    content = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
    # The header, where it is the weights: what else they hold is any number at all.
    place = data.draw(st.integers(0, min(len(content), 2500)))
    length = data.draw(st.sampled_from([0, 1, 8, 10**6]))
    put = data.draw(st.binary(max_size=8))
    (folder / name).write_bytes(content[:place] + put + content[place + length :])
    answers_or_is_refused(folder)
