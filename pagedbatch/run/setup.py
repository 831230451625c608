"""Sets up what a run needs of a model: tokenizer and defaults first, then weights, runner and engine.

Only here does a run import the device half, and late: mistakes in the command show before torch is loaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagedbatch.config import EngineConfig
from pagedbatch.constraints.build import ConstraintSource
from pagedbatch.engine.engine import Engine
from pagedbatch.engine.stopping import Detokenize
from pagedbatch.errors import ParamError, RowError, UsageError
from pagedbatch.input.chat.template import ChatTemplate
from pagedbatch.input.requests import ModelLimits, PromptBuilder
from pagedbatch.input.source_encoder import SourceLimits
from pagedbatch.params import GenerationParams, resolve
from pagedbatch.settings import RunSettings
from pagedbatch.stats.memory import MemoryAccount

if TYPE_CHECKING:
    from pagedbatch.model.loader import LoadedModel
    from pagedbatch.model.model_defaults import ModelDefaults
    from pagedbatch.model.runner import ModelRunner

_log = logging.getLogger(__name__)


#: Logits of prompt tokens that a step may hold for prompt logprobs: 256 MiB in float32.
_SCORED_LOGITS = 2**26
#: Share of the host memory that is free once weights and pool are allocated that one row may take.
_ROW_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TokenizerSetup:
    """What turns rows into tokens and back: ready before the weights are loaded, so that mistakes show early.

    `params` are those of a row that sets none itself.
    """

    tokenizer: Any
    defaults: ModelDefaults
    prompts: PromptBuilder
    params: GenerationParams


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The weights, the runner on top of them, and the engine on top of that."""

    loaded: LoadedModel
    runner: ModelRunner
    engine: Engine

    def used(self) -> dict[str, Any]:
        """What the `auto` settings came to."""
        return {
            "attention": self.runner.backend_name,
            "forward": self.runner.forward_name,
            "num_blocks": self.runner.num_blocks,
            "device": str(self.loaded.device),
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
        }


def set_up_tokenizer(settings: RunSettings, constraint: ConstraintSource | None) -> TokenizerSetup:
    """Loads the tokenizer and the model's defaults.

    Args:
        constraint: that of the whole run; None if there is none.

    Raises:
        UsageError: no such model, or it can't do what is asked of it.
    """
    from pagedbatch.model.host_memory import limit_caches
    from pagedbatch.model.model_defaults import model_defaults, num_token_ids
    from pagedbatch.model.tokenizer import load_tokenizer

    limit_caches()
    defaults = model_defaults(
        settings.model,
        trust_remote_code=settings.trust_remote_code,
        ignore_adapter=settings.ignore_adapter,
        use_generation_config=settings.generation_config != "none",
        asked_model_len=settings.max_model_len,
    )
    tokenizer = load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
    defaults = replace(defaults, num_token_ids=num_token_ids(tokenizer, defaults))
    for remark in defaults.remarks:
        _log.info(remark)
    if defaults.generation.left_out:
        _log.warning(
            "the model's generation_config sets %s: left out, there is no such control",
            ", ".join(defaults.generation.left_out),
        )
    _check_defaults(settings, defaults)
    prompts = PromptBuilder(
        tokenizer,
        _limits(defaults),
        model_defaults=defaults.generation.values,
        run_settings=settings.generation,
        prompt_column=settings.prompt_column,
        prompt_template=settings.prompt_template,
        chat=settings.chat,
        template=ChatTemplate(
            tokenizer,
            now=settings.now,
            variables=settings.chat_template_kwargs,
            asked_date=settings.date is not None,
        ),
        run_constraint=constraint,
    )
    try:
        params = prompts.resolve_params({})
        prompts.constraint({}, params)
    except RowError as error:
        field = str(error).partition(":")[0]
        if field in defaults.generation.values and field not in settings.generation:
            raise UsageError(
                f"{error}; {defaults.generation.place} sets it: mend it, or leave the model's defaults out: "
                "--generation-config none"
            ) from None
        raise UsageError(f"{error} (for model {settings.model})") from None
    return TokenizerSetup(tokenizer, defaults, prompts, params)


def _limits(defaults: ModelDefaults) -> ModelLimits:
    config, start, source = defaults.config.source, defaults.decoder_start_token_id, None
    if config is not None and start is not None:
        source = SourceLimits(defaults.max_model_len, config.vocab_size, start, config.padding_id)
    return ModelLimits(
        max_model_len=defaults.max_model_len,
        vocab_size=defaults.config.vocab_size,
        eos_token_ids=defaults.eos_token_ids,
        num_token_ids=defaults.num_token_ids,
        source=source,
    )


def _check_defaults(settings: RunSettings, defaults: ModelDefaults) -> None:
    """Whether the model's generation defaults go with each other and with what was asked for the run.

    Raises:
        UsageError: they don't; it names their file.
    """
    try:
        resolve(defaults.generation.values, settings.generation)
    except ParamError as error:
        names = ", ".join(sorted(defaults.generation.values))
        raise UsageError(
            f"{error}; {defaults.generation.place} sets {names}, which don't all go together with what is asked: "
            "mend it, or leave the model's defaults out: --generation-config none"
        ) from None


def set_up_engine(settings: RunSettings, tokenizer_setup: TokenizerSetup, *, memory_share: float = 1.0) -> EngineSetup:
    """Loads the weights, allocates the KV pool and makes the engine.

    Args:
        memory_share: fraction of a CPU's free memory that this engine may use.

    Raises:
        UsageError: the model or the pool does not fit what this machine or this engine can do.
    """
    from pagedbatch.model.host_memory import keep_activations
    from pagedbatch.model.loader import load_model
    from pagedbatch.model.runner import ModelRunner

    loaded = load_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        ignore_adapter=settings.ignore_adapter,
        defaults=tokenizer_setup.defaults,
    )
    runner = ModelRunner.create(
        loaded,
        attention=settings.attention,
        forward=settings.forward,
        keep_model=False,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        kv_memory=settings.kv_memory,
        swap_space=settings.swap_space,
        max_num_seqs=settings.max_num_seqs,
        memory_share=memory_share,
    )
    keep_activations()
    config = engine_config(
        settings, tokenizer_setup.defaults, runner.num_blocks, runner.num_swap_blocks, memory_share=memory_share
    )
    return EngineSetup(loaded, runner, Engine(config, runner, _detokenizer(tokenizer_setup.tokenizer)))


def engine_config(
    settings: RunSettings,
    defaults: ModelDefaults,
    num_blocks: int,
    num_swap_blocks: int,
    *,
    memory_share: float = 1.0,
) -> EngineConfig:
    """The engine's config for pools of these sizes.

    Args:
        memory_share: fraction of the memory that is free now that the engine may use.
    """
    import torch

    from pagedbatch.model.kv_cache import free_memory

    return EngineConfig(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_scored_tokens=max(1, _SCORED_LOGITS // defaults.config.vocab_size),
        max_model_len=defaults.max_model_len,
        window=defaults.config.max_window,
        preemption=settings.preemption,
        prefix_cache=settings.prefix_cache,
        eos_token_ids=defaults.eos_token_ids,
        vocab_size=defaults.config.vocab_size,
        host_memory=int(_ROW_SHARE * memory_share * free_memory(torch.device("cpu"))),
    )


def new_account(settings: RunSettings, engine_setup: EngineSetup) -> MemoryAccount:
    """An empty memory account for an engine's pool."""
    return MemoryAccount(
        num_blocks=engine_setup.runner.num_blocks,
        block_size=settings.block_size,
        block_bytes=engine_setup.runner.block_bytes,
        max_num_seqs=settings.max_num_seqs,
    )


def _detokenizer(tokenizer: Any) -> Detokenize:
    def detokenize(token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    return detokenize
