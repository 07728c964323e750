"""GRPO with Tunix: its sampler follows by `lm.Sync` as it does by Tunix' own way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

import lazymodel as lm

pytestmark = pytest.mark.large

PAGE = Path(__file__).parents[2] / "docs" / "sync.md"
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


def three_steps(rollout_engine: Any) -> tuple[Any, ...]:
    """Completions with their rewards, losses, and the weights of the trainer and of the sampler in the end."""
    devices = np.array(jax.devices()[:8])
    training, sampling = (Mesh(half.reshape(2, 2), ("fsdp", "tp")) for half in (devices[:4], devices[4:]))
    seen: list[Any] = []

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        scores = [len(set(each)) / (len(each) + 1) for each in completions]
        seen.append((list(completions), scores))
        return scores

    def model() -> Any:
        return lm.build_abstract(qwen3.Qwen3, CONFIG, rngs=nnx.Rngs(params=0)).shard(training).materialize()

    Role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=model(),
        reference=model(),
        tokenizer=Characters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={Role.ACTOR: training, Role.REFERENCE: training, Role.ROLLOUT: sampling},
            rollout_engine=rollout_engine,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2), eval_every_n_steps=100, max_steps=3
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32, seed=jax.random.PRNGKey(0)
            ),
        ),
    )
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=4), reward)
    trainer, rollout = cluster.actor_trainer, cluster.rollout
    learner.train([{"prompts": np.array(["hello", "world"])} for _ in range(3)])
    losses = cluster._rl_metrics_logger.get_metric_history("actor", "loss", "train")
    weights = [jax.tree.map(np.asarray, nnx.state(each, nnx.Param)) for each in (trainer.model, rollout.model())]
    return seen, [float(each) for each in losses], *weights


def test_grpo_is_the_same_with_sync() -> None:
    (code,) = re.findall(r"```python\n([^`]*?VanillaRollout.*?)```", PAGE.read_text(), flags=re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    stock, ours = three_steps("vanilla"), three_steps(names["SyncedRollout"])
    assert len(stock[1]) == 3 and stock[0][0] != stock[0][1]  # the sampler changes
    assert stock[:2] == ours[:2]
    for expected, found in zip(stock[2:], ours[2:], strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, expected, found))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours[2], ours[3]))
