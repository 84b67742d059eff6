"""`epruntime preflight` shows its verdict once; the log says what the ranks compute with and how they exchange."""

from __future__ import annotations

import subprocess
import sys

from epruntime.ops.extension import kernel_signature
from epruntime.testing import tiny_models
from epruntime.testing.patience import PATIENCE_S


def test_the_verdict_is_shown_once(tmp_path):
    _, model = tiny_models.build("mixtral")  # 4 experts
    tiny_models.save(model, tmp_path)
    command = [sys.executable, "-m", "epruntime.cli", "preflight", str(tmp_path), "--expert-parallel-size"]
    done = subprocess.run([*command, "1"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count("preflight passed"), done.stderr.count("preflight")) == (1, 0)
    for name, value in kernel_signature().items():
        assert f"{name} {value}" in done.stderr
    assert "transport local for 1 rank (best supported)" in done.stderr


def test_more_ranks_than_experts_are_a_warning(tmp_path):
    config, model = tiny_models.build("mixtral", num_local_experts=2)
    tiny_models.save(model, tmp_path)
    size = config.num_local_experts + 1
    command = [sys.executable, "-m", "epruntime.cli", "preflight", str(tmp_path), "--expert-parallel-size", str(size)]
    done = subprocess.run([*command, "--threads-per-rank", "1"], capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert f"WARNING ranks-idle (rank {size - 1})" in done.stdout
