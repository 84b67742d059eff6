"""Free memory under control groups, KV budgets, and the bodies of control messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from epruntime.errors import ConfigError, ProtocolError
from epruntime.worker.kv_budget import num_kv_blocks, resolve_max_model_len
from epruntime.worker.letters import Configure, Load, parse
from epruntime.worker.memory import free_memory_bytes, process_memory_bytes

MIB, GIB = 2**20, 2**30


def host(root: Path, *, available: int, groups: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    if groups:
        (root / "proc/self/cgroup").write_text(groups)
    return root


def group(path: Path, *, v2: bool, limit: str, usage: int, cache: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (path / names[0]).write_text(limit + "\n")
    (path / names[1]).write_text(f"{usage}\n")
    (path / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\nother 3\n")


def test_free_memory_without_groups(tmp_path):
    assert free_memory_bytes(host(tmp_path, available=8 * GIB)) == 8 * GIB


def test_free_memory_honours_the_tightest_of_nested_groups_v2(tmp_path):
    host(tmp_path, available=8 * GIB, groups="0::/pod/container\n")
    base = tmp_path / "sys/fs/cgroup"
    group(base / "pod/container", v2=True, limit="max", usage=100 * MIB, cache=0)
    group(base / "pod", v2=True, limit=str(2 * GIB), usage=1536 * MIB, cache=256 * MIB)
    assert free_memory_bytes(tmp_path) == 768 * MIB  # 2048 - 1536 + 256


def test_free_memory_honours_groups_v1_seen_from_inside_a_container(tmp_path):
    # The path names the host's hierarchy; the container sees its own group at the mount's root.
    host(tmp_path, available=8 * GIB, groups="5:cpu:/x\n4:memory:/docker/abc\n0::/\n")
    group(tmp_path / "sys/fs/cgroup/memory", v2=False, limit=str(GIB), usage=900 * MIB, cache=100 * MIB)
    assert free_memory_bytes(tmp_path) == 224 * MIB  # 1024 - 900 + 100


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    host(tmp_path, available=GIB, groups="0::/\n")
    group(tmp_path / "sys/fs/cgroup", v2=True, limit=str(MIB), usage=2 * MIB, cache=0)
    assert free_memory_bytes(tmp_path) == 0


def test_this_process_has_memory():
    memory = process_memory_bytes()
    assert 0 < memory["pss"] <= memory["rss"]
    assert free_memory_bytes() > 0


def blocks(**changes: object) -> int:
    arguments: dict[str, object] = {
        "num_blocks": None,
        "memory_bytes": None,
        "block_size": 16,
        "bytes_per_block": MIB,
        "max_model_len": 161,
        "whole_length": True,
        "max_num_seqs": 4,
        "ranks_on_host": 2,
        "free_bytes": GIB,
    }
    return num_kv_blocks(**{**arguments, **changes})  # type: ignore[arg-type]


def test_the_default_is_what_the_sequences_need_up_to_a_quarter_of_the_share():
    assert blocks() == 40  # 160 computed tokens are 10 blocks, times 4
    assert blocks(max_num_seqs=64) == 128  # 1 GiB / 4 / 2 ranks = 128 MiB
    assert blocks(max_num_seqs=64, ranks_on_host=8) == 32


def test_configured_budgets_are_taken_as_they_are():
    assert blocks(memory_bytes=20 * MIB + 5) == 20
    assert blocks(num_blocks=11, memory_bytes=20 * MIB) == 11
    assert blocks(num_blocks=10) == 10, "exactly one sequence"


def test_too_little_for_the_named_length_is_an_error_with_figures():
    for changes, words in (
        ({"num_blocks": 9}, ("num_kv_blocks=9", "9 KV blocks of 16", "max_model_len=161", "needs 10", "at most 145")),
        ({"memory_bytes": 9 * MIB}, ("kv_cache_memory_gb=0.00879", "needs 10")),
        ({"ranks_on_host": 64}, ("4 KV blocks", "64 ranks", "1 GiB free", "at most 65")),
    ):
        with pytest.raises(ConfigError) as error:
            blocks(**changes)
        assert all(word in str(error.value) for word in words), str(error.value)


def test_a_default_length_takes_what_fits_but_at_least_a_block():
    assert blocks(num_blocks=3, whole_length=False) == 3
    with pytest.raises(ConfigError, match="0 KV blocks"):
        blocks(memory_bytes=MIB - 1, whole_length=False)


def test_more_than_the_free_memory_is_refused():
    with pytest.raises(ConfigError, match=r"2 GiB, but this host has 1 GiB"):
        blocks(num_blocks=2048)


def test_max_model_len_is_bounded_by_the_model():
    assert resolve_max_model_len(None, model_limit=512) == 512
    assert resolve_max_model_len(512, model_limit=512) == 512
    with pytest.raises(ConfigError, match=r"max_model_len=513 .* limit of 512"):
        resolve_max_model_len(513, model_limit=512)


def test_bodies_with_missing_or_unknown_fields_are_refused():
    body = {
        "type": "load",
        "id": 3,
        "generation": 1,
        "model": "m",
        "dtype": "auto",
        "max_model_len": None,
        "block_size": 16,
        "num_kv_blocks": None,
        "kv_cache_memory_bytes": None,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
    }
    assert parse(Load, body).ranks_on_host == 1
    with pytest.raises(ProtocolError, match=r"load.*fancy"):
        parse(Load, {**body, "fancy": 1})
    with pytest.raises(ProtocolError, match=r"configure.*ep_rank"):
        parse(Configure, {"type": "configure", "id": 1, "generation": 4})
