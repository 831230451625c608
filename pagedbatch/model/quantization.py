"""Checks whether a checkpoint's quantisation can be loaded here: the method, its package, the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedbatch.model.library_errors import is_installed, quiet, reason
from pagedbatch.model.model_files import shown

#: quant_method -> module, and the pip packages that provide it.
_PACKAGES = {
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "gptq": ("gptqmodel", "gptqmodel optimum"),
    "awq": ("gptqmodel", "gptqmodel"),
    "auto-round": ("auto_round", "auto-round"),
    "torchao": ("torchao", "torchao"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "hqq": ("hqq", "hqq"),
    "aqlm": ("aqlm", "aqlm"),
    "eetq": ("eetq", "eetq"),
    "quark": ("quark", "amd-quark"),
    "vptq": ("vptq", "vptq"),
    "spqr": ("spqr_quant", "spqr_quant"),
}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The quantization_config of a config (whole, or its text part) as in its file; None if it has none."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None or isinstance(found, dict):
        return found
    as_dict: dict[str, Any] = found.to_dict()
    return as_dict


def quantization_method(settings: Mapping[str, Any]) -> Any:
    """The method's name; None if the settings have none."""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return settings.get("quant_method")


def quantization_problem(config: Any) -> str | None:
    """Why the checkpoint's quantisation can't be loaded here; None if it can, or there is none."""
    settings = quantization_of(config)
    if settings is None:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

    method = quantization_method(settings)
    if not isinstance(method, str):
        return f"quantization_config.quant_method must be a text, got {shown(method)}"
    known = sorted({name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING})
    if method not in known:
        return f"its quantisation, {shown(method)}, is none that transformers loads ({', '.join(known)})"
    module, package = _PACKAGES.get(method, (None, ""))
    if module is not None and not is_installed(module):
        return f"its quantisation, {method}, needs a package: pip install {package}"
    try:
        with quiet():
            quantizer = AutoHfQuantizer.from_config(dict(settings), pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # each method has checks of its own
        return f"its quantisation, {method}, can't be loaded here: {reason(error)}"
    return None
