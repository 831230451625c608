"""Tiny models for tests, each built in under a second: their weights are made here, none is downloaded.

`table_model` is for what can be worked out on paper, `rand_model` for what must not change when blocks move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, EOT = range(4)
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<eot>"]

#: `table_model`: current letter -> odds of the next token.
NEXT_TOKEN_ODDS: dict[str, dict[str, float]] = {
    # From "a": the end is likely at once, and longer paths have the better mean per token.
    "a": {"b": 0.50, "c": 0.30, "<eos>": 0.20},
    "b": {"<eos>": 0.40, "d": 0.35, "e": 0.25},
    "c": {"f": 0.90, "<eos>": 0.10},
    "d": {"e": 0.60, "<eos>": 0.40},
    "e": {"f": 0.70, "<eos>": 0.30},
    "f": {"g": 0.95, "<eos>": 0.05},
    "g": {"h": 0.95, "<eos>": 0.05},
    "h": {"<eos>": 0.98, "h": 0.02},
    # From "m": a second end token.
    "m": {"<eot>": 0.70, "n": 0.30},
    "n": {"<eos>": 0.60, "n": 0.40},
    # From "t": exact ties.
    "t": {"u": 0.25, "v": 0.25, "w": 0.25, "x": 0.25},
    # From "z": no end.
    "z": {"z": 0.999, "y": 0.001},
    "y": {"z": 1.0},
    # From "p": one path, so fewer continuations than beams.
    "p": {"q": 1.0},
    "q": {"r": 1.0},
}
#: Odds of every token that a row of the table leaves out. A token without a row is followed by `<eos>`.
OTHER_ODDS = 1e-6

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def table_model(path: Path) -> None:
    """Saves a one-layer Llama whose next-token odds are `NEXT_TOKEN_ODDS`: one letter is one token.

    Token embeddings are one-hot and attention adds zero, so the head's column of the current token is the next one's
    log odds. Context: 256 tokens.
    """
    size = 64
    letters = list("abcdefghijklmnopqrstuvwxyz .XYZ0123456789")
    named = SPECIAL_TOKENS + letters
    vocab = {token: i for i, token in enumerate(named + [f"<unused{i}>" for i in range(size - len(named))])}
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rms_norm_eps=1e-12,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = _seeded_llama(config, seed=0)
    log_odds = torch.full((size, size), math.log(OTHER_ODDS))  # [current token, next token]
    for token, i in vocab.items():
        for next_token, odds in NEXT_TOKEN_ODDS.get(token, {"<eos>": 1.0}).items():
            log_odds[i, vocab[next_token]] = math.log(odds)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(log_odds.T / math.sqrt(size))  # RMSNorm makes a one-hot vector sqrt(size) long

    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    _save(path, model, tokenizer, eos=EOS, chat_template=None)


def code_model(path: Path, codes: Sequence[str]) -> None:
    """Saves a random Llama whose vocabulary is the special tokens and `codes`, each one token. Context: 64 tokens."""
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *codes])}
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.35,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<[^>]*>"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    _save(path, _seeded_llama(config, seed=0), tokenizer, eos=EOS, chat_template=None)


def rand_model(
    path: Path,
    *,
    kv: int = 2,
    heads: int = 4,
    head_dim: int = 16,
    layers: int = 2,
    seed: int = 0,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Saves a Llama with seeded random weights and a byte-level vocabulary: any wrong K or V changes what it writes.

    It has `heads` query heads over `kv` KV heads, two end tokens, a context of 512 tokens, and by default a chat
    template that writes `<bos>` itself.
    """
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    config = LlamaConfig(
        vocab_size=len(vocab) + -len(vocab) % 16,
        hidden_size=heads * head_dim,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.35,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    model = _seeded_llama(config, seed)
    with torch.no_grad():
        model.lm_head.weight[len(vocab) :] = 0  # ids past the vocabulary

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    _save(path, model, tokenizer, eos=[EOS, EOT], chat_template=chat_template)


def _seeded_llama(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


def _save(
    path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, eos: int | list[int], chat_template: str | None
) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    wrapped.chat_template = chat_template
    model.generation_config.update(eos_token_id=eos, pad_token_id=PAD, bos_token_id=BOS)
    model.save_pretrained(path)
    wrapped.save_pretrained(path)
