"""What each key of a row means: our options, other tools' names for them, and options of theirs that are not here.

Plain rows and the bodies of OpenAI batch rows are read by this one table. `docs/rows.md` follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedbatch.constraint import CONSTRAINT_FIELDS
from pagedbatch.input.fields.field_forms import (
    Fields,
    add_special_tokens,
    chat_kwarg,
    choices,
    do_sample,
    is_object_list,
    json_object,
    renamed,
    response_format,
    structured_outputs,
    suppressed,
    top_logprobs,
)
from pagedbatch.params import READERS

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
#: What the outputs of an encoder-decoder continue.
TARGET_FIELDS = ("decoder_prompt",)
#: What a chat template is given beside the messages.
CHAT_FIELDS = ("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
#: Whose turn a row is; not a part of its question.
PLACE_FIELDS = ("id", "priority")
#: Every option that a row may give, by our own name.
OPTIONS = frozenset(READERS) | frozenset(CONSTRAINT_FIELDS) | frozenset(CHAT_FIELDS)


def _any(value: Any) -> bool:
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_true(value: Any) -> bool:
    return value is True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object_or_its_text(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{"))


def _is_object_list_or_its_text(value: Any) -> bool:
    return is_object_list(value) or (isinstance(value, str) and value.lstrip().startswith("["))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and any(key in value for key in keys)


def _names_options(value: Any) -> bool:
    """Whether a value is an object of generation options, and not what else is called parameters."""
    return isinstance(value, Mapping) and any(
        len(name) > 1 and (name in READERS or name in SYNONYMS) for name in value if isinstance(name, str)
    )


@dataclass(frozen=True, slots=True)
class Synonym:
    """Another tool's name for something that is here.

    `means` says what it comes to. `read` gives our fields for its name and value, and raises `RowError`. `takes` tells,
    in a plain row, the values that are this option from those of a data column of the same name. `is_text`: a cell of
    CSV is its value as it stands; others are JSON.
    """

    means: str
    read: Callable[[str, Any], Fields]
    takes: Callable[[Any], bool] = _any
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Lacked:
    """Another tool's option that is not here. `instead` names what is nearest to it; empty where nothing is.

    Values in `neutral` ask for nothing, as do null, false and what is empty. `takes` is as in `Synonym`.
    """

    instead: str = ""
    neutral: tuple[Any, ...] = ()
    takes: Callable[[Any], bool] = _any

    def is_neutral(self, value: Any) -> bool:
        """Whether a value asks for nothing."""
        return asks_nothing(value) or any(type(value) is not bool and value == each for each in self.neutral)

    def is_asked_by(self, value: Any) -> bool:
        """Whether a column with this value is the option, and asks for something."""
        return self.takes(value) and not self.is_neutral(value)


def asks_nothing(value: Any) -> bool:
    """Whether a value asks for nothing, whatever its key."""
    return value is None or value is False or value in ("", "none", [], {}, {"type": "text"})


def _same(option: str, *, is_text: bool = False) -> Synonym:
    return Synonym(f"`{option}`", renamed(option), is_text=is_text)


def _structure(means: str, read: Callable[[str, Any], Fields]) -> Synonym:
    """An object or a list, or its JSON text; a CSV column may also be one of text that a prompt is made of."""
    return Synonym(means, read, is_text=True)


def _kwarg(name: str, kind: type, takes: Callable[[Any], bool] = _any) -> Synonym:
    return Synonym(f"`{name}` in `chat_template_kwargs`", chat_kwarg(name, kind), takes)


#: Keys of Hugging Face's `generate`, vLLM, SGLang, TGI, llama.cpp, Ollama and OpenAI that are here by another name.
SYNONYMS: dict[str, Synonym] = {
    "max_new_tokens": _same("max_tokens"),
    "max_completion_tokens": _same("max_tokens"),
    "max_output_tokens": _same("max_tokens"),
    "max_gen_toks": _same("max_tokens"),
    "n_predict": _same("max_tokens"),
    "num_predict": _same("max_tokens"),
    "min_new_tokens": _same("min_tokens"),
    "num_return_sequences": _same("n"),
    "stop_sequences": _same("stop", is_text=True),
    "stop_strings": _same("stop", is_text=True),
    "stop_words": _same("stop", is_text=True),
    "include_stop_str_in_output": _same("include_stop"),
    "no_stop_trim": _same("include_stop"),
    "random_seed": _same("seed"),
    "sampling_seed": _same("seed"),
    "bad_words_ids": _same("bad_words"),
    "suppress_tokens": Synonym("`bad_words`, each token one of them", suppressed),
    "do_sample": Synonym("false: `temperature` 0. true: samples, at 1.0 where no temperature is given", do_sample),
    "top_logprobs": Synonym("how many `logprobs`, beside `logprobs` true", top_logprobs),
    "add_special_tokens": Synonym("false: `add_bos` false. true: as by default", add_special_tokens),
    "response_format": _structure("`json_schema`, or `regex` or `grammar`", response_format),
    "structured_outputs": _structure("the constraint that it holds", structured_outputs),
    "guided_decoding": _structure("the constraint that it holds", structured_outputs),
    "guided_json": _same("json_schema", is_text=True),
    "guided_json_object": Synonym("true: any JSON object", json_object),
    "guided_regex": _same("regex", is_text=True),
    "guided_grammar": _same("grammar", is_text=True),
    "guided_choice": _structure("`allowed_outputs`", choices),
    "ebnf": _same("grammar", is_text=True),
    "enable_thinking": _kwarg("enable_thinking", bool),
    "thinking": _kwarg("thinking", bool, lambda value: isinstance(value, bool)),
    "reasoning_effort": _kwarg("reasoning_effort", str),
    "tool_choice": Synonym(
        "none: `tools` are left out. auto: as by default. Others are refused", renamed("tool_choice"), is_text=True
    ),
}

#: Keys whose value is an object of options, which are read as if they stood in the row itself.
BUNDLES: dict[str, Callable[[Any], bool]] = {
    "sampling_params": _any,
    "sampling_parameters": _any,
    "generation_kwargs": _any,
    "gen_kwargs": _any,
    "generation_config": _is_object_or_its_text,
    "extra_body": _is_object_or_its_text,
}

_STOPS = "stop or stop_token_ids"
_FORMS = "json_schema, regex or grammar"
_FILTERS = "top_p or min_p"

#: Options of the same tools that are not here.
LACKED: dict[str, Lacked] = {
    # lengths and ends
    "max_length": Lacked("max_tokens, which counts new tokens alone", takes=_is_number),
    "min_length": Lacked("min_tokens, which counts new tokens alone", (0,), _is_number),
    "max_time": Lacked("max_tokens", takes=_is_number),
    "t_max_predict_ms": Lacked("max_tokens", (0,)),
    "eos_token_id": Lacked("stop_token_ids, beside the model's own end tokens"),
    "stop_regex": Lacked(_STOPS),
    "stopping_criteria": Lacked(_STOPS),
    "exponential_decay_length_penalty": Lacked("length_penalty"),
    # prompts
    "echo": Lacked("prompt_logprobs, to score a prompt", takes=_is_true),
    "suffix": Lacked("--prompt-template, with the model's own marks for filling in", takes=_is_text),
    "return_full_text": Lacked("--keep, to carry the prompt along", takes=_is_true),
    "truncate": Lacked("truncate_prompt", takes=_is_number),
    "truncate_prompt_tokens": Lacked("truncate_prompt"),
    "chat_template": Lacked("--prompt-template, or another tokenizer's template in the model's folder", takes=_is_text),
    "functions": Lacked("tools", takes=_is_object_list_or_its_text),
    "function_call": Lacked("tool_choice", ("auto",)),
    "prompt_embeds": Lacked("prompt_token_ids"),
    "multi_modal_data": Lacked(),
    "mm_processor_kwargs": Lacked(),
    "image_data": Lacked(takes=_is_list),
    "audio": Lacked(takes=_has("voice", "format")),
    "modalities": Lacked("", (["text"],), _is_list),
    "prediction": Lacked(takes=_has("type")),
    "web_search_options": Lacked(),
    "verbosity": Lacked("chat_template_kwargs", ("medium",), _is_text),
    "reasoning": Lacked("reasoning_effort or chat_template_kwargs", takes=_has("effort", "max_tokens")),
    "stream": Lacked("", takes=_is_true),
    # beams
    "use_beam_search": Lacked("num_beams"),
    "beam_width": Lacked("num_beams and n", (1,)),
    "beam_size": Lacked("num_beams and n", (1,)),
    "num_hypotheses": Lacked("n", (1,)),
    "force_words_ids": Lacked(_FORMS),
    # sampling
    "typical_p": Lacked(_FILTERS, (1,)),
    "top_a": Lacked("min_p", (0,)),
    "top_h": Lacked("min_p"),
    "top_n_sigma": Lacked("min_p", (0, -1)),
    "tfs": Lacked(_FILTERS, (1,)),
    "tfs_z": Lacked(_FILTERS, (1,)),
    "epsilon_cutoff": Lacked("min_p", (0,)),
    "eta_cutoff": Lacked("min_p", (0,)),
    "mirostat": Lacked("temperature and top_p", (0,)),
    "mirostat_mode": Lacked("temperature and top_p", (0,)),
    "dynatemp_range": Lacked("temperature", (0,)),
    "xtc_probability": Lacked("", (0,)),
    "smoothing_factor": Lacked("temperature", (0,)),
    "samplers": Lacked("", takes=_is_list),
    "penalty_alpha": Lacked("", (0,)),
    "guidance_scale": Lacked("", (1,)),
    "cfg_scale": Lacked("", (1,)),
    "negative_prompt_ids": Lacked(),
    "dola_layers": Lacked(),
    # penalties and biases
    "repeat_penalty": Lacked("repetition_penalty, which counts the whole context", (1,)),
    "repeat_last_n": Lacked("repetition_penalty, which counts the whole context", (-1,)),
    "repetition_penalty_range": Lacked("repetition_penalty, which counts the whole context", (0, -1)),
    "encoder_repetition_penalty": Lacked("repetition_penalty", (1,)),
    "encoder_no_repeat_ngram_size": Lacked("no_repeat_ngram_size", (0,)),
    "dry_multiplier": Lacked("no_repeat_ngram_size", (0,)),
    "begin_suppress_tokens": Lacked("bad_words"),
    "sequence_bias": Lacked("logit_bias"),
    "logits_processor": Lacked("logit_bias, bad_words or allowed_token_ids"),
    "logits_processors": Lacked("logit_bias, bad_words or allowed_token_ids"),
    "custom_logit_processor": Lacked("logit_bias, bad_words or allowed_token_ids"),
    "prefix_allowed_tokens_fn": Lacked(f"allowed_outputs, {_FORMS}"),
    "renormalize_logits": Lacked(),
    "token_healing": Lacked(),
    "watermark": Lacked(takes=_is_true),
    "watermarking_config": Lacked(),
    # forms
    "structural_tag": Lacked(_FORMS),
    "guided_whitespace_pattern": Lacked("grammar"),
    # what is written
    "details": Lacked("logprobs", takes=_is_true),
    "decoder_input_details": Lacked("prompt_logprobs"),
    "top_n_tokens": Lacked("logprobs", (0,)),
    "n_probs": Lacked("logprobs", (0,)),
    "return_logprob": Lacked("logprobs"),
    "top_logprobs_num": Lacked("logprobs", (0,)),
    "output_scores": Lacked("logprobs"),
    "output_logits": Lacked("logprobs"),
    "output_attentions": Lacked(),
    "output_hidden_states": Lacked(),
    "return_tokens_as_token_ids": Lacked("logprobs, whose entries hold token ids"),
    # models
    "lora": Lacked("--model, with the adapter merged into it", takes=_is_list),
    "lora_request": Lacked("--model, with the adapter merged into it"),
    "adapter_id": Lacked("--model, with the adapter merged into it", takes=_is_text),
    # bundles by names that data columns have too
    "parameters": Lacked("sampling_params", takes=_names_options),
    "options": Lacked("sampling_params", takes=_names_options),
}

#: Keys of the same tools that change nothing in an answer here. Where any key must have a meaning, these are let pass.
HARMLESS = frozenset({
    "model", "user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "prompt_cache_key",
    "prompt_cache_retention", "safety_identifier", "request_id", "cache_salt", "include_reasoning",
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "low_memory", "prefill_chunk_size", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "return_dict_in_generate", "remove_invalid_values", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind",
    "assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "speculation_type", "use_mtp", "continuous_batching_config", "transformers_version", "_from_model_config",
    "detokenize", "spaces_between_special_tokens", "skip_clone", "output_kind", "output_text_buffer_length",
    "skip_reading_prefix_cache", "flat_logprobs", "guided_decoding_backend", "return_token_ids", "return_tokens",
    "cache_prompt", "id_slot", "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
})  # fmt: skip

#: CSV columns whose cells are JSON: all others are text.
JSON_CELLS = (
    (frozenset(READERS) - {"stop"})
    | {"messages", "prompt_token_ids", "priority", "add_generation_prompt", "continue_final_message"}
    | {name for name, synonym in SYNONYMS.items() if not synonym.is_text}
    | {name for name, lacked in LACKED.items() if lacked.takes in (_any, _is_number, _is_true)}
)

#: Every key that the table knows.
KNOWN = (
    OPTIONS
    | SYNONYMS.keys()
    | BUNDLES.keys()
    | LACKED.keys()
    | HARMLESS
    | {*PROMPT_FIELDS, *TARGET_FIELDS, *PLACE_FIELDS}
)
