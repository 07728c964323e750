"""Tunix' sampler as a program of its own: `RemoteRollout` is for the trainer, `serve` is what the sampler runs.

Weights go by `lm.SyncServer` and `lm.SyncClient`, which on two machines need an address and a token. Prompts and
completions go by a connection of `multiprocessing`, which unpickles: both ends have to trust each other. For
`test_tunix_rl`, `python -m tests.others.tunix_two_programs PORT` is the sampler of the trainer at that port.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Client, Connection
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3 import model as qwen3
from tunix.rl.rollout.base_rollout import BaseRollout, CacheConfig, RolloutConfig, RolloutOutput
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

import lazymodel as lm

CONFIG = qwen3.ModelConfig(
    num_layers=2, vocab_size=32, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=4, norm_eps=1e-6,
    rope_theta=10_000, use_tied_embedding=True,
)  # fmt: skip


class Characters:
    """A tokenizer."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3 + ord(character) % 29 for character in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(97 + int(each) % 26) for each in ids)

    def pad_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2


class RemoteRollout(BaseRollout):
    """Samples by asking the program at the other end of a connection: `functools.partial(RemoteRollout, connection)`.

    `mesh` is not used: the sampler has its own.
    """

    def __init__(
        self, sampler: Connection, *, rollout_actor: Any, tokenizer: Any, mesh: Mesh, rollout_config: RolloutConfig
    ) -> None:
        self._sampler, self._tokenizer = sampler, tokenizer
        self._server = lm.SyncServer(rollout_actor)
        self._server.publish(rollout_actor)
        sampler.send((self._server.address, rollout_config.kv_cache_size))

    def _ask(self, *request: Any) -> Any:
        self._sampler.send((self._server.version, *request))
        return self._sampler.recv()

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        return self._ask("generate", prompts, rollout_config)

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> Any:
        return self._ask("get_per_token_logps", prompt_tokens, completion_tokens)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        self._server.publish(params)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None, which to Tunix is a model that does not share the trainer's weights: it calls `update_params`."""


def serve(trainer: Connection, mesh: Mesh) -> None:
    """Answers a `RemoteRollout` with the weights that it published last, until it is gone."""
    address, cache_size = trainer.recv()
    abstract = lm.build_abstract(qwen3.Qwen3, CONFIG, rngs=nnx.Rngs(params=1)).shard(mesh)  # other weights at first
    sync = lm.SyncClient(address, abstract)
    sizes = {name: getattr(CONFIG, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
    rollout = VanillaRollout(abstract.materialize(), Characters(), CacheConfig(cache_size=cache_size, **sizes))
    while True:
        try:
            version, method, *arguments = trainer.recv()
        except EOFError:
            return
        if sync.version < version:
            sync.pull(into=rollout._sampler.transformer_state, after=version - 1)
        with mesh:
            answer = getattr(rollout, method)(*arguments)
        trainer.send(answer)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    with Client(("127.0.0.1", int(sys.argv[1])), authkey=b"tests") as trainer:
        serve(trainer, Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tp")))
