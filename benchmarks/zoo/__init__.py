"""Small models of many architectures, and the table of how each of them is split."""

from benchmarks.zoo.architecture import Architecture
from benchmarks.zoo.torch_models import TORCH
from benchmarks.zoo.transformers_models import DECODERS, ENCODERS, VISION_AND_SOUND

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for architecture in (*DECODERS, *ENCODERS, *VISION_AND_SOUND, *TORCH)
}
