"""Ranks inside an existing Ray program: the caller's placement group, its tasks and actors, GPUs, stale addresses."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from epruntime.errors import ConfigError, LaunchError
from epruntime.launchers.caller_group import callers_group
from epruntime.launchers.pool import RankPool
from epruntime.testing import tiny_models
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.reference import greedy_reference

ray = pytest.importorskip("ray")

from ray.util.placement_group import (  # noqa: E402
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

from epruntime.launchers import ray_cluster  # noqa: E402
from epruntime.launchers.ray import RayLauncher  # noqa: E402
from epruntime.launchers.ray_actor import ActorPlace  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ENTRY = "epruntime.testing.echo_rank:run_rank"
PROMPT, COUNT = [5, 17, 99, 3], 6
CPUS = 5


@pytest.fixture(scope="module", autouse=True)
def program() -> Iterator[None]:
    """This process is a Ray program: a cluster of one node whose GPUs are 6 and 4, as a scheduler might mask them.
    (Ray only counts GPUs: none is needed.)"""
    folder = tempfile.mkdtemp(prefix="ept-", dir="/tmp")  # Ray's sockets need a short path
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "6,4")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            num_cpus=CPUS, num_gpus=2, include_dashboard=False, object_store_memory=80 * 2**20,
            logging_level=logging.ERROR, log_to_driver=False, _temp_dir=folder,
        )  # fmt: skip
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_group() -> Iterator[object]:
    made: list[PlacementGroup] = []

    def make(*bundles: dict[str, float]) -> PlacementGroup:
        made.append(placement_group([dict(bundle) for bundle in bundles]))
        ray.get(made[-1].ready(), timeout=PATIENCE_S)
        return made[-1]

    yield make
    for group in made:
        remove_placement_group(group)
    deadline = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("CPU") != CPUS:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


def run(coroutine, seconds: float = 150):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def start(num_ranks: int, **options) -> RankPool:
    device = options.pop("device", "cpu")
    launcher = RayLauncher(entry=ENTRY, device=device, placement_group=options.pop("placement_group", None))
    return await RankPool.start(num_ranks, launcher=launcher, device=device, **options)


def bundle_of(group: PlacementGroup, num_bundles: int) -> list[float]:
    """Free CPUs of each bundle."""
    (free,) = ray._private.state.available_resources_per_node().values()
    return [free.get(f"CPU_group_{index}_{group.id.hex()}", 0.0) for index in range(num_bundles)]


def state(group: PlacementGroup) -> str:
    return placement_group_table(group)["state"]


def test_a_given_group_is_used_one_rank_per_bundle_and_stays(make_group):
    group = make_group({"CPU": 2}, {"CPU": 2}, {"CPU": 1})

    async def body():
        pool = await start(2, placement_group=group)
        try:
            who = await asyncio.gather(*(rank.call("whoami", timeout_s=PATIENCE_S) for rank in pool.ranks))
            assert [w["threads"] for w in who] == [2, 2]  # as many as two bundles have
            deadline = time.monotonic() + PATIENCE_S
            while bundle_of(group, 3) != [0, 0, 1] and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            assert bundle_of(group, 3) == [0, 0, 1]
            before = len([t for t in placement_group_table().values() if t["state"] == "CREATED"])
            assert before == 1  # none was made beside it
        finally:
            await pool.stop()
        assert state(group) == "CREATED"
        pool = await start(3, placement_group=group, threads_per_rank=1)  # and can be used again
        await pool.stop()
        assert ray.is_initialized()

    run(body())


def test_a_group_without_room_is_told_with_what_is_free_and_asked(make_group):
    small, half_taken = make_group({"CPU": 1}, {"CPU": 1}), make_group({"CPU": 1}, {"CPU": 1})

    @ray.remote(num_cpus=1)
    class Holder:
        def ready(self) -> bool:
            return True

    strategy = PlacementGroupSchedulingStrategy(half_taken, 0)
    holder = Holder.options(scheduling_strategy=strategy).remote()
    assert ray.get(holder.ready.remote())

    async def body():
        began = time.monotonic()
        with pytest.raises(LaunchError, match="no room for 3 ranks of 1 CPU each") as too_small:
            await start(3, placement_group=small, start_timeout_s=30)
        assert time.monotonic() - began < soon(10)  # it never will have room: nothing to wait for
        for words in (small.id.hex(), "bundle 0: CPU 1 free of 1", "bundle 1: CPU 1 free of 1", "expert_parallel_size"):
            assert words in str(too_small.value)
        with pytest.raises(LaunchError, match="no room for 1 rank of 2 CPU each"):
            await start(1, placement_group=small, threads_per_rank=2, start_timeout_s=30)
        began = time.monotonic()
        with pytest.raises(LaunchError, match="no room for 2 ranks of 1 CPU each") as taken:
            await start(2, placement_group=half_taken, threads_per_rank=1, start_timeout_s=2)
        assert 2 <= time.monotonic() - began < soon(10)
        assert "bundle 0: CPU 0 free of 1" in str(taken.value)
        assert state(small) == state(half_taken) == "CREATED"

        waits = placement_group([{"CPU": 1}] * 2)  # the CPU that is left is one
        with pytest.raises(LaunchError, match=r"no room within 2 s: .* its state is PENDING.*'CPU': 1"):
            await start(1, placement_group=waits, start_timeout_s=2)
        remove_placement_group(waits)
        with pytest.raises(LaunchError, match="was removed"):
            await start(1, placement_group=waits)

    run(body())
    ray.kill(holder)


def test_groups_that_cannot_be_meant():
    with pytest.raises(ConfigError, match=r"must be a ray\.util\.placement_group\.PlacementGroup"):
        RayLauncher(placement_group="group")


def test_the_group_of_a_task_or_actor_is_captured_as_ray_captures_it(make_group):
    group = make_group({"CPU": 1}, {"CPU": 1}, {"CPU": 1})

    def group_seen() -> str | None:
        seen = callers_group("ray", None)
        return None if seen is None else seen.id.hex()

    @ray.remote(num_cpus=0)
    def task():
        return group_seen()

    @ray.remote(num_cpus=0)
    class Actor:
        def see(self):
            return group_seen()

    @ray.remote(num_cpus=0)
    class AsyncActor:
        async def see(self):
            return group_seen()

    for capture, expected in ((True, group.id.hex()), (False, None)):
        strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=capture)
        placed = {"scheduling_strategy": strategy}
        seen = [task.options(**placed).remote(), Actor.options(**placed).remote().see.remote()]
        seen.append(AsyncActor.options(**placed).remote().see.remote())
        assert ray.get(seen) == [expected] * 3
    assert ray.get(task.remote()) is None
    assert group_seen() is None
    assert callers_group("local", None) is None


def test_llm_in_a_task_of_a_group_generates_in_that_group(make_group, tmp_path):
    """Ray does not know a task's group on other threads than its own, and LLM has a thread."""
    _, made = tiny_models.build("mixtral", 0)
    expected = greedy_reference(made, [PROMPT], max_new_tokens=COUNT).tokens[0]
    model = str(tiny_models.save(made, tmp_path / "tiny"))
    group = make_group({"CPU": 1}, {"CPU": 1}, {"CPU": 1})

    @ray.remote(num_cpus=1)
    def generate() -> tuple[list[int], list[str]]:
        from epruntime.engine.llm import LLM
        from epruntime.sampling_params import SamplingParams

        # the address of an existing cluster is no harm where this process is connected already
        with LLM(model, expert_parallel_size=2, launcher="ray", ray_address="auto", preflight=False) as llm:
            (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=COUNT), use_tqdm=False)
            groups = [t["placement_group_id"] for t in placement_group_table().values() if t["state"] == "CREATED"]
            return list(output.outputs[0].token_ids), groups

    strategy = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    tokens, groups = ray.get(generate.options(scheduling_strategy=strategy).remote(), timeout=90)
    assert tokens == expected
    assert groups == [group.id.hex()]
    assert state(group) == "CREATED"


def test_ranks_with_gpus_see_all_of_them_and_are_told_their_own():
    async def body():
        pool = await start(2, device="cuda")
        try:
            who = await asyncio.gather(*(rank.call("whoami", timeout_s=PATIENCE_S) for rank in pool.ranks))
            assert {w["environment"]["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] for w in who} == {"1"}
            # in the order of their node, and not each its own
            assert [w["environment"]["CUDA_VISIBLE_DEVICES"] for w in who] == ["6,4"] * 2
            assert sorted(w["device_index"] for w in who) == [0, 1]
        finally:
            await pool.stop()
        with pytest.raises(LaunchError, match=r"(?s)within 2 s: asked for 3 ranks of 1 GPU each.*GPU 2 free of 2"):
            await start(3, device="cuda", start_timeout_s=2)

    run(body())


def test_two_ranks_on_one_gpu_are_refused():
    launcher = RayLauncher(device="cuda")
    place = ActorPlace(pid=1, host="big", node_id="n1", log="", device_index=3)
    launcher._check_device(0, place)
    launcher._check_device(1, dataclasses.replace(place, device_index=2))
    launcher._check_device(2, dataclasses.replace(place, node_id="n2"))
    launcher._check_device(0, place)  # again, after it was replaced
    with pytest.raises(LaunchError, match="ranks 0 and 3 would share GPU 3 of big"):
        launcher._check_device(3, place)


def test_the_address_of_a_cluster_that_has_ended():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
    program = """
import asyncio
from epruntime.errors import LaunchError
from epruntime.launchers.pool import RankPool
try:
    asyncio.run(RankPool.start(1, launcher="ray", ray_address="auto"))
except LaunchError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_ADDRESS": dead},
    )  # fmt: skip
    for words in ("no Ray cluster listens at ray_address=", "'auto', by RAY_ADDRESS", "That cluster has ended"):
        assert words in done.stdout, done.stdout + done.stderr


def test_the_address_of_a_dashboard(monkeypatch):
    """RAY_ADDRESS is often set to it, for `ray job submit`."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    for address in ("auto", "http://127.0.0.1:8265"):
        with pytest.raises(LaunchError, match=r"http://127.*of its dashboard: give HOST:6379"):
            ray_cluster.find(address)
