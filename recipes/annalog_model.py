"""Prints the folder of ANNalog, an encoder-decoder that writes analogues of molecules. Creates it first if missing.

The model (3 + 3 layers of 256, MIT licence, https://pypi.org/project/annalog) is a checkpoint of its own kind in the
wheel `annalog`, which pip fetches. It is converted once to a Marian checkpoint, whose arithmetic is the same. No code
of the wheel is run: the weights are read as tensors alone, and the vocabulary as lists of texts.
"""

from __future__ import annotations

import json
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

from model_cache import cached_model, fetch_wheel, print_model, say

WHEEL = "annalog==1.0.6"
NAME = "ANNalog"
WEIGHTS = "annalog/ckpt_and_vocab/Lev_extended.pt"
VOCABULARY = "annalog/ckpt_and_vocab/stereo_experiment_vocab_ttf.pkl"
UNK, PAD, START, END = range(4)
NUM_LAYERS, NUM_HEADS = 3, 8
#: A token of SMILES: an atom in brackets, the number of a ring above 9, two letters, or one.
TOKEN = r"\[[^\]]*\]|%\d{2}|Br|Cl|."
#: ANNalog's names of modules -> Marian's.
_MODULES = {
    "tok_embedding": "embed_tokens",
    "pos_embedding": "embed_positions",
    "self_attention": "self_attn",
    "encoder_attention": "encoder_attn",
    "enc_attn_layer_norm": "encoder_attn_layer_norm",
    "ff_layer_norm": "final_layer_norm",
    "fc_q": "q_proj",
    "fc_k": "k_proj",
    "fc_v": "v_proj",
    "fc_o": "out_proj",
    "fc_1": "fc1",
    "fc_2": "fc2",
}


def annalog_model() -> Path:
    """The model's folder, created now if it is missing."""
    return cached_model(NAME, _make)


def _make(work: Path, folder: Path) -> None:
    say(NAME, f"fetching the wheel {WHEEL} (15 MB), and converting it, once")
    with zipfile.ZipFile(fetch_wheel(WHEEL, work)) as wheel:
        weights, vocabulary = (Path(wheel.extract(member, work)) for member in (WEIGHTS, VOCABULARY))
    folder.mkdir()
    tokens = _texts(vocabulary)
    _write_weights(weights, folder)
    _write_configs(len(tokens), folder)
    _write_tokenizer(tokens, folder)


class _TextsOnly(pickle.Unpickler):
    """Reads containers and texts; whatever names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the vocabulary names {module}.{name}")


def _texts(vocabulary: Path) -> list[str]:
    with vocabulary.open("rb") as file:
        texts: list[str] = _TextsOnly(file).load()["itos"]
    return texts


def _write_weights(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in torch.load(source, map_location="cpu", weights_only=True).items():
        parts = [part for part in name.split(".") if part != "positionwise_feedforward"]
        if parts[1] == "fc_out":
            is_bias = parts[2] == "bias"
            tensors["final_logits_bias" if is_bias else "lm_head.weight"] = tensor[None] if is_bias else tensor
        else:
            tensors[".".join(["model", *(_MODULES.get(part, part) for part in parts)])] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_configs(vocab_size: int, folder: Path) -> None:
    config = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": vocab_size,
        "decoder_vocab_size": vocab_size,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "d_model": 256,
        "encoder_layers": NUM_LAYERS,
        "decoder_layers": NUM_LAYERS,
        "encoder_attention_heads": NUM_HEADS,
        "decoder_attention_heads": NUM_HEADS,
        "encoder_ffn_dim": 512,
        "decoder_ffn_dim": 512,
        "max_position_embeddings": 102,
        "activation_function": "relu",
        "scale_embedding": True,
        "is_encoder_decoder": True,
        "dtype": "float32",
    }
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END, "decoder_start_token_id": START}
    no_force = {"forced_eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config | special | no_force, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(special | {"max_length": 102}, indent=1))


def _write_tokenizer(tokens: list[str], folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    ends = [(tokens[START], START), (tokens[END], END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokens[START]} $A {tokens[END]}", special_tokens=ends
    )
    names = {"unk_token": UNK, "pad_token": PAD, "bos_token": START, "eos_token": END}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=102,
        clean_up_tokenization_spaces=False,
        **{name: tokens[token_id] for name, token_id in names.items()},
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(print_model(NAME, annalog_model))
