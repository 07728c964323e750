"""GRPO with Tunix: its sampler follows by `lm.Sync`, or in another program, as it does by Tunix' own way."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
from tests.conftest import ROOT, child_environment
from tests.others import tunix_two_programs
from tests.others.tunix_two_programs import CONFIG, Characters, RemoteRollout

pytestmark = pytest.mark.large

PAGE = Path(__file__).parents[2] / "docs" / "sync.md"


def three_steps(rollout_engine: Any, *, alone: bool = False) -> tuple[Any, ...]:
    """Completions with their rewards, losses, and what is in the end: the sampler's logarithms of probabilities of
    some tokens, the trainer's weights, and the sampler's if its model is here.

    Args:
        rollout_engine: As Tunix takes it.
        alone: The trainer has no mesh for a sampler.
    """
    devices = np.array(jax.devices()[:8])
    training, sampling = (Mesh(half.reshape(2, 2), ("fsdp", "tp")) for half in (devices[:4], devices[4:]))
    if alone:
        sampling = training
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
    tokens = jnp.arange(16).reshape(2, 8) + 3
    answers = np.asarray(cluster.get_old_per_token_logps(tokens, tokens)).tolist()
    models = [each for each in (trainer.model, rollout.model()) if each is not None]
    weights = [jax.tree.map(np.asarray, nnx.state(each, nnx.Param)) for each in models]
    return seen, [float(each) for each in losses], answers, *weights


@pytest.fixture(scope="module")
def stock() -> tuple[Any, ...]:
    """What Tunix' own sampler, moved by Tunix, leads to."""
    found = three_steps("vanilla")
    assert len(found[1]) == 3 and found[0][0] != found[0][1]  # the sampler changes
    return found


def same(expected: Any, found: Any) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, expected, found))


def test_grpo_is_the_same_with_sync(stock: tuple[Any, ...]) -> None:
    (code,) = re.findall(r"```python\n([^`]*?VanillaRollout.*?)```", PAGE.read_text(), flags=re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    ours = three_steps(names["SyncedRollout"])
    assert stock[:3] == ours[:3]
    assert same(stock[3], ours[3]) and same(stock[4], ours[4]) and same(ours[3], ours[4])


def test_grpo_is_the_same_in_two_programs(stock: tuple[Any, ...]) -> None:
    with Listener(("127.0.0.1", 0), authkey=b"tests") as listener:
        command = [sys.executable, "-m", tunix_two_programs.__name__, str(listener.address[1])]
        sampler = subprocess.Popen(command, cwd=ROOT, env=child_environment())
        with listener.accept() as connection:
            ours = three_steps(functools.partial(RemoteRollout, connection), alone=True)
        assert sampler.wait(60) == 0
    assert stock[:3] == ours[:3]
    assert same(stock[3], ours[3])
