"""What `ray job submit` tells a job in its environment. Imports no Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

#: seconds between the SIGTERM and the SIGKILL of `ray job stop`, unless this variable of the job's says otherwise
#: (ray/dashboard/modules/job/job_supervisor.py).
STOP_WAIT, _STOP_WAIT_S = "RAY_JOB_STOP_WAIT_TIME_S", 3.0
#: seconds of it that are kept for what follows a drain: ranks leave, Ray is left.
_AFTER_DRAIN_S = 2.5


def job_id(environment: Mapping[str, str] = os.environ) -> str:
    """The submission id of the job that this process is the entry of; "" if it is none."""
    metadata = _config(environment).get("metadata", {})
    return str(metadata.get("job_submission_id", ""))


def runtime_env(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What the job was submitted with; {} outside a job. The same field may not be given again when joining."""
    return dict(_config(environment).get("runtime_env", {}))


def longest_drain_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds that running requests have when the job is stopped, before Ray kills it; None outside a job."""
    if not job_id(environment):
        return None
    try:
        wait_s = float(environment.get(STOP_WAIT, _STOP_WAIT_S))
    except ValueError:
        wait_s = _STOP_WAIT_S
    return max(wait_s - _AFTER_DRAIN_S, 0.0)


def _config(environment: Mapping[str, str]) -> dict[str, Any]:
    return dict(json.loads(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}"))
