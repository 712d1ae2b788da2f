"""Which models the lab can measure: dense decoder-only models that transformers itself implements.

The one idea: a model that would be measured wrongly is refused in one line, before its weights are fetched.
The configuration tells most; the rest is seen in the model's layers, built without memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashgap.model_files import ModelError, one_line, raw_config

SUPPORTED = "use a dense decoder-only model (Llama, GLM, Qwen, Mistral, ...)"


def is_native(model_type: str) -> bool:
    """Whether transformers itself has a causal language model of this type (then `auto_map` is ignored)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def check_raw_config(folder: Path) -> None:
    """Refuse what shows in `config.json` alone: remote code and weights that are already quantised."""
    config = raw_config(folder)
    kind = config.get("model_type", "(none)")
    if config.get("auto_map") and not is_native(kind):
        raise ModelError(
            f"model '{kind}': needs remote code (auto_map), which is never run here; {SUPPORTED}"
        )
    if config.get("quantization_config"):
        raise ModelError(quantized_message(kind, config["quantization_config"]))


def read_config(folder: Path) -> Any:
    """The transformers configuration of a folder; `ModelError` if this transformers does not know it."""
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # ValueError, KeyError or a validation error of its own, by what is wrong
        raise ModelError(
            f"{folder / 'config.json'}: not usable: {str(error).split(chr(10))[0][:200]}"
        ) from error


def check_supported(config: Any) -> None:
    """Refuse, in one line, what the lab cannot measure; builds the layers without memory to look at them."""
    check_config(config)
    check_layers(skeleton(config))


def check_config(config: Any) -> None:
    """What a configuration alone tells: kind of model, experts, quantisation, remote code."""
    kind = config.model_type
    if getattr(config, "auto_map", None) and not is_native(kind):
        raise ModelError(
            f"model '{kind}': needs remote code (auto_map), which is never run here; {SUPPORTED}"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(quantized_message(kind, config.quantization_config))
    if config.is_encoder_decoder:
        raise ModelError(f"model '{kind}': encoder-decoder; {SUPPORTED}")
    if not is_native(kind):
        raise ModelError(f"model '{kind}': not a causal language model in this transformers; {SUPPORTED}")
    if getattr(config, "is_decoder", None) is False:  # BERT and its kin, which see the tokens to come
        raise ModelError(f"model '{kind}': an encoder, not a causal decoder; {SUPPORTED}")
    if config.get_text_config() is not config:
        raise ModelError(f"model '{kind}': several models in one (images or sound); {SUPPORTED}")
    experts = [
        n for n in ("num_experts", "num_local_experts", "n_routed_experts") if getattr(config, n, None)
    ]
    if experts:
        raise ModelError(
            f"model '{kind}': mixture of experts ({experts[0]}: {getattr(config, experts[0])}); {SUPPORTED}"
        )


def quantized_message(kind: str, quantization: Any) -> str:
    """Why a checkpoint that is already quantised is refused, and what to use."""
    data = quantization if isinstance(quantization, dict) else getattr(quantization, "__dict__", {})
    method = data.get("quant_method", "unknown method")
    return (
        f"model '{kind}': already quantised (quantization_config: {getattr(method, 'value', method)}); give the "
        "unquantised original as model.id, and this one as the build: builds.flash: {checkpoint: {id: ...}}"
    )


def skeleton(config: Any, dtype: str = "bfloat16") -> Any:
    """The model's modules on the meta device: shapes, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with quiet(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # any layer of any model may object to its own sizes
        raise ModelError(
            f"model '{config.model_type}': cannot be built from its configuration: {one_line(str(error))}"
        ) from error


def check_layers(module: Any) -> None:
    """Refuse layer kinds the builds do not know: Conv1D (GPT-2), experts, recurrent state."""
    kind = module.config.model_type
    names = {type(child).__name__ for child in module.modules()}
    if "Conv1D" in names:
        raise ModelError(f"model '{kind}': Conv1D layers in place of linear ones; {SUPPORTED}")
    experts = sorted(name for name in names if re.search(r"MoE|Moe|Experts|SparseMixer", name))
    if experts:
        raise ModelError(f"model '{kind}': mixture of experts ({experts[0]}); {SUPPORTED}")
    if getattr(type(module), "_is_stateful", False):
        raise ModelError(f"model '{kind}': keeps a recurrent state instead of a cache; {SUPPORTED}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' warnings and progress bars inside the block; errors still raise."""
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        from transformers.utils import logging as library

        shown = library.is_progress_bar_enabled()
        library.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            if shown:
                library.enable_progress_bar()
    finally:
        logging.disable(before)
