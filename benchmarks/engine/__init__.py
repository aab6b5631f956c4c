"""The engine against everything that could be used in its place, on one model: step time, memory, collectives."""

from benchmarks.engine.data_parallel import DataParallel
from benchmarks.engine.deepspeed_autotp import DeepSpeedAutoTP
from benchmarks.engine.megatron import HandWritten, HandWrittenCompiled
from benchmarks.engine.one_process import OneProcess, OneProcessCompiled, OneProcessTwoThreads
from benchmarks.engine.ours import LightningTP, LightningTPCompiled
from benchmarks.engine.peer import Peer
from benchmarks.engine.torch_parallelize import TorchParallelize
from benchmarks.engine.transformers_llama import TransformersOneProcess, TransformersTensorParallel

PEERS: dict[str, type[Peer]] = {
    peer.name: peer
    for peer in (
        OneProcess,
        OneProcessTwoThreads,
        DataParallel,
        HandWritten,
        TorchParallelize,
        LightningTP,
        TransformersOneProcess,
        TransformersTensorParallel,
        DeepSpeedAutoTP,
        OneProcessCompiled,
        HandWrittenCompiled,
        LightningTPCompiled,
    )
}
"""By name, in the order of the table and of each round."""
