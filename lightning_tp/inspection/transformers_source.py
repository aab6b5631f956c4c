"""Models of transformers from a configuration alone: no weights, no network."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from lightning_tp.inspection.subject import InspectError, in_words, near_misses
from lightning_tp.plan.meta import parameters_on_meta

_WITH_WEIGHTS = 500_000_000
"""Parameters of a model that is built with its weights; a larger one has none, and needs no memory for them."""
_LARGEST_EXPERTS = 200_000_000
_SAMPLES, _LENGTH, _SOUND_LENGTH, _FRAMES = 2, 16, 8000, 64
_FIRST_TOKEN, _TOKENS = 4, 100
"""Token ids that stand for text in most vocabularies: the first few are padding and the like."""
# Auto classes, in the order in which they are looked for. What has a head for masked words is an encoder, though most
# of these have one for the next word too; encoder-decoders also exist as decoders by themselves.
_ENCODER_DECODER = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_OTHERS = (
    "AutoModelForMaskedLM", "AutoModelForImageTextToText", "AutoModelForCausalLM", *_ENCODER_DECODER,
    "AutoModelForZeroShotImageClassification", "AutoModelForImageClassification", "AutoModelForCTC",
    "AutoModelForAudioClassification", "AutoModel",
)  # fmt: skip
# What makes a training step differ from the next beyond dropout, which the planner switches off by itself.
_RANDOM_STEPS = {"layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "apply_spec_augment": False}


def transformers_model(name: str, overrides: Sequence[str]) -> nn.Module:
    """The model of a config file or folder, config class (``LlamaConfig``) or model type (``llama``).

    Args:
        name: What stands after ``hf:``.
        overrides: ``key=value`` for fields of the config, ``text_config.key=value`` for those of a part.

    Raises:
        InspectError: transformers is not installed, there is no such config, or its model cannot be built.
    """
    try:
        import transformers
    except ImportError as error:
        raise InspectError(
            f"hf:{name} needs transformers, which cannot be imported ({error}). Install it: "
            "pip install 'lightning-tp[hf]'."
        ) from error
    config_class, fields = _config_source(name, transformers)
    try:
        given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise InspectError(f"the overrides cannot be read: {error}") from error
    _check_fields(config_class(), given, overrides)
    try:
        config = config_class.from_dict(_merged(fields, given, config_class()))
        for part in (config, *_parts(config).values()):
            for key, value in {**_RANDOM_STEPS, "use_cache": False}.items():
                if hasattr(part, key):
                    setattr(part, key, value)
    except Exception as error:
        raise InspectError(f"hf:{name}: the config does not take these fields: {in_words(error)}") from error
    model_class = _model_class(config, transformers)
    try:
        with torch.device("meta"):
            parameters = {key: p.shape for key, p in _built(model_class, config).named_parameters()}
        _refuse_large_experts(name, parameters, config)
        total = sum(shape.numel() for shape in parameters.values())
        print(f"building {model_class.__name__} with {total:,} parameters ...", file=sys.stderr)
        with parameters_on_meta() if total > _WITH_WEIGHTS else contextlib.nullcontext():
            return _built(model_class, config)
    except InspectError:
        raise
    except Exception as error:
        raise InspectError(f"hf:{name}: {model_class.__name__} could not be built: {in_words(error)}") from error


def _refuse_large_experts(name: str, parameters: Mapping[str, torch.Size], config: Any) -> None:
    """Raise for experts held in one tensor that would not fit into memory, where the planner needs them for now.

    Raises:
        InspectError: with overrides that make them smaller.
    """
    large = [key for key, shape in parameters.items() if len(shape) > 2 and shape.numel() > _LARGEST_EXPERTS]
    if not large:
        return
    smaller = {"n_routed_experts": 8, "num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 1024}
    parts = {"": config, **{f"{part}.": value for part, value in _parts(config).items()}}
    advice = [
        f"{prefix}{key}={value}"
        for prefix, part in parts.items()
        for key, value in {**smaller, "intermediate_size": 1024}.items()
        if isinstance(getattr(part, key, None), int)
        and getattr(part, key) > value
        and not (prefix and key in vars(config))
    ]
    raise InspectError(
        f"hf:{name}: {large[0]} {list(parameters[large[0]])} holds all experts of a layer in one tensor of more than "
        f"{_LARGEST_EXPERTS:,} elements, which must be in memory while the plan is found. Its layers are split alike "
        f"whatever their size is, so make them smaller with overrides, such as {' '.join(advice)}."
    )


def _config_source(name: str, transformers: Any) -> tuple[Any, dict[str, Any]]:
    """The class of the config, and the fields that a file gives it."""
    path = Path(name)
    if path.exists() or name.endswith(".json"):
        if not (path / "config.json" if path.is_dir() else path).is_file():
            raise InspectError(f"hf:{name}: there is no config.json. Give a config file, or the folder that holds one.")
        try:
            fields, _ = transformers.PretrainedConfig.get_config_dict(name, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InspectError(f"hf:{name}: the config cannot be read: {error}") from error
        kind = fields.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            near = near_misses(str(kind), transformers.CONFIG_MAPPING.keys())
            raise InspectError(f"hf:{name}: transformers has no model_type {kind!r}, which the file gives.{near}")
        return transformers.CONFIG_MAPPING[kind], fields
    if name in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[name], {}
    config_class = getattr(transformers, name, None)
    if isinstance(config_class, type) and issubclass(config_class, transformers.PretrainedConfig):
        return config_class, {}
    kinds = list(transformers.CONFIG_MAPPING.keys())
    known = [*kinds, *(entry for entry in dir(transformers) if entry.endswith("Config"))]
    hub = " Models of the Hub are not downloaded: give the path of their config.json." if os.sep in name else ""
    raise InspectError(
        f"hf:{name} is no config file or folder, no config class of transformers and no model type.{hub}"
        f"{near_misses(name, known)}"
    )


def _check_fields(config: Any, given: dict[str, Any], overrides: Sequence[str], prefix: str = "") -> None:
    """Raise unless every override names a field of the config, whose constructor would keep any other as well."""
    known = {*config.to_dict(), *type(config).attribute_map, *vars(config)}
    parts = _parts(config)
    for key, value in given.items():
        if key not in known:
            override = next(text for text in overrides if text.startswith(f"{prefix}{key}"))
            raise InspectError(f"{override}: {type(config).__name__} has no field {key}.{near_misses(key, known)}")
        if key in parts and isinstance(value, dict):
            _check_fields(parts[key], value, overrides, f"{prefix}{key}.")


def _merged(fields: dict[str, Any], given: dict[str, Any], default: Any) -> dict[str, Any]:
    merged = dict(fields)
    for key, value in given.items():
        part = _parts(default).get(key)
        if part is not None and isinstance(value, dict):
            value = {"model_type": part.model_type, **(fields.get(key) or {}), **value}
        # A field that goes by two names must not keep its old value under the other one.
        merged.pop(type(default).attribute_map.get(key, key), None)
        merged[key] = value
    return merged


def _parts(config: Any) -> dict[str, Any]:
    """The configs within a config: of the text model, of the vision model, ..."""
    parts = {name: getattr(config, name, None) for name in type(config).sub_configs}
    return {name: part for name, part in parts.items() if part is not None}


def _model_class(config: Any, transformers: Any) -> Any:
    """The class that the config names, or the one that an auto class of transformers takes for it."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    order = (*_ENCODER_DECODER, *_OTHERS) if config.is_encoder_decoder else _OTHERS
    for name in order:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise InspectError(f"transformers has no model for {type(config).__name__}.")


def _built(model_class: Any, config: Any) -> nn.Module:
    return model_class._from_config(config, dtype=torch.float32)


def is_pretrained_model(model: nn.Module) -> bool:
    """Whether ``model`` is one of transformers, which is not imported for the question."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Two small random samples for a model of transformers, by its main input and its config.

    Raises:
        InspectError: its main input is none that can be made up.
    """
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    text = config.get_text_config()
    kind = str(model.main_input_name)
    inputs: dict[str, Tensor] = {}
    if kind == "input_ids":
        inputs[kind] = _tokens(text, generator)
        if type(model).__name__ in _image_and_text_models():
            inputs["pixel_values"] = _pictures(config, generator)
    elif kind == "pixel_values":
        inputs[kind] = _pictures(config, generator)
    elif kind == "input_values":
        bins = getattr(config, "num_mel_bins", None)
        shape = (_SOUND_LENGTH,) if bins is None else (config.max_length, bins)
        inputs[kind] = torch.randn(_SAMPLES, *shape, generator=generator)
    elif kind == "input_features":
        inputs[kind] = torch.randn(_SAMPLES, *_features_shape(model, config), generator=generator)
    else:
        raise InspectError(
            f"{type(model).__name__} takes {kind}, for which no example can be made up. "
            "Give one: --inputs package.module:Callable."
        )
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(config.get_text_config(decoder=True), generator)
    return inputs


def _image_and_text_models() -> set[str]:
    """Classes that compare pictures with texts, and need both."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES as NAMES

    return set(NAMES.values())


def _tokens(config: Any, generator: torch.Generator) -> Tensor:
    """Token ids ``[samples, length]``."""
    vocabulary = getattr(config, "vocab_size", _TOKENS)
    positions = next(_values(config, "max_target_positions", "max_position_embeddings"), _LENGTH)
    length = max(1, min(_LENGTH, positions))
    return torch.randint(
        min(_FIRST_TOKEN, vocabulary - 1), min(_TOKENS, vocabulary), (_SAMPLES, length), generator=generator
    )


def _pictures(config: Any, generator: torch.Generator) -> Tensor:
    """Pixels ``[samples, channels, height, width]``."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = next(_values(vision, "num_channels", "in_channels"), 3)
    return torch.randn(_SAMPLES, channels, height, width, generator=generator)


def _features_shape(model: nn.Module, config: Any) -> tuple[int, int]:
    """Shape of one sample's spectrogram: ``[bins, frames]`` where positions are fixed, else ``[frames, bins]``."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        return config.num_mel_bins, 2 * config.max_source_positions
    bins = next(_values(config, "input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins"), None)
    if bins is None:
        raise InspectError(
            f"the config of {type(model).__name__} does not say how many features a frame has. "
            "Give an example: --inputs package.module:Callable."
        )
    return _FRAMES, bins


def _values(config: Any, *names: str) -> Iterator[int]:
    return (value for value in (getattr(config, name, None) for name in names) if isinstance(value, int))
