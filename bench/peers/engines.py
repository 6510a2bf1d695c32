"""The engines that are compared, lowlat first."""

from bench.peers.engine import Engine
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.own import Own
from bench.peers.sglang import Sglang
from bench.peers.tensorrt_llm import TensorrtLlm
from bench.peers.transformers import Transformers
from bench.peers.vllm import Vllm

__all__ = ["ENGINES"]

_ALL: tuple[Engine, ...] = (Own(), Vllm(), Sglang(), TensorrtLlm(), LlamaCpp(), Transformers())
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}
