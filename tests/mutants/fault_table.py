"""The faults of `make mutants`, by the part of the code that they are put into."""

from __future__ import annotations

from faults import Fault
from kernel_faults import KERNELS
from model_faults import EXPERTS, SAMPLING

_CONTROL = "tests/unit/test_control_channel.py::"
_ASYNC = "tests/unit/test_async_llm.py::"
_ENDS = "tests/unit/test_async_llm_ends.py::"

SCHEDULING = (
    Fault(
        id="block-freed-early",
        words="a request's KV blocks are free while a plan in flight may still write them",
        file="epruntime/engine/scheduler.py",
        old="        last_touched = self._planned_step\n",
        new="        last_touched = self._applied_step\n",
        test="tests/unit/test_scheduler.py::test_a_stop_is_found_out_late_and_the_blocks_wait_for_the_plan_that_counted_on_it",
    ),
    Fault(
        id="quarantine-skipped",
        words="blocks given up are released at once",
        file="epruntime/engine/kv_reference.py",
        old="        if until_step <= self._ended_step:\n",
        new="        if until_step >= 0:\n",
        test="tests/unit/test_kv_cache.py::test_released_blocks_of_an_ended_step_are_free_at_once_and_later_ones_wait",
    ),
    Fault(
        id="prefix-without-parent",
        words="a KV block is found by its own tokens, whatever came before them",
        file="epruntime/engine/block_pool.py",
        old='    return parent.to_bytes(8, "little") + token_ids\n',
        new="    return token_ids\n",
        test="tests/unit/test_block_pool.py::test_match_stops_at_the_first_gap",
    ),
    Fault(
        id="prefix-hit-skips-prompt-logprobs",
        words="a cached prefix is taken although its log-probabilities were asked for",
        file="epruntime/engine/kv_reference.py",
        old="min(num_tokens - 1, num_skippable)",
        new="(num_tokens - 1)",
        test="tests/unit/test_kv_cache.py::test_a_prefix_is_taken_up_to_what_may_be_skipped",
    ),
    Fault(
        id="oldest-preempted",
        words="where blocks are short the request that came first loses its own",
        file="epruntime/engine/scheduler.py",
        old="victim = max(chain(self._decoding, self._prefilling), key=lambda r: r.arrival)",
        new="victim = min(chain(self._decoding, self._prefilling), key=lambda r: r.arrival)",
        test="tests/unit/test_scheduler_properties.py::test_the_first_arrival_is_never_preempted",
    ),
    Fault(
        id="one-sequence-too-many",
        words="max_num_seqs + 1 sequences run at once",
        file="epruntime/engine/scheduler.py",
        old="        if running >= self._max_num_seqs or ",
        new="        if running > self._max_num_seqs or ",
        test="tests/unit/test_scheduler.py::test_max_num_seqs_bounds_what_runs_and_a_slot_is_free_once_the_last_token_is_planned",
    ),
    Fault(
        id="tombstone-dropped",
        words="a rank forgets at once that a request has ended, and refuses plans that still name it",
        file="epruntime/worker/input_batch.py",
        old="        self._ended[request.rid] = step\n",
        new="        self._ended.pop(request.rid, step)\n",
        test="tests/unit/test_runner.py::test_a_request_that_ended_leaves_nothing_to_do_for_plans_in_flight",
    ),
    Fault(
        id="abort-frees-nothing",
        words="an aborted or abandoned request goes on computing",
        file="epruntime/engine/async_llm.py",
        old="        for sequence in state.sequences:\n            self._core.drop(sequence.rid)\n",
        new="        for sequence in state.sequences[1:0]:\n            self._core.drop(sequence.rid)\n",
        test=_ENDS + "test_all_sequences_end_with_the_request",
    ),
    Fault(
        id="queue-limit-off",
        words="max_queued_requests is not enforced",
        file="epruntime/engine/live_requests.py",
        old="        if len(self.sequences) + params.n > limit:\n",
        new="        if len(self.sequences) < 0:\n",
        test=_ASYNC + "test_max_queued_requests_counts_sequences",
    ),
    Fault(
        id="dead-engine-silent",
        words="requests of a dead engine wait for ever",
        file="epruntime/engine/async_llm.py",
        old="        for state in self._live:\n            state.fail(error)\n",
        new="        for state in list(self._live)[:0]:\n            state.fail(error)\n",
        test=_ENDS + "test_a_dead_engine_ends_requests_in_every_state_and_says_so",
    ),
    Fault(
        id="victim-blamed",
        words="of a stuck group the rank that waits is blamed, not the one that is waited for",
        file="epruntime/engine/blame.py",
        old="    behind = min(_position(stamp) for _, stamp in known)\n",
        new="    behind = max(_position(stamp) for _, stamp in known)\n",
        test="tests/unit/test_blame.py::test_the_one_that_computes_is_to_blame_and_not_those_that_wait_for_it",
    ),
)

CONTROL = (
    Fault(
        id="old-generation-accepted",
        words="the coordinator takes messages of a generation that has ended",
        file="epruntime/comm/control_server.py",
        old="            if generation < self.generation:\n",
        new="            if generation < -1:\n",
        test=_CONTROL + "test_old_generations_are_refused_both_ways",
    ),
    Fault(
        id="old-plan-accepted",
        words="a rank carries out a plan of a generation that has ended",
        file="epruntime/comm/control_client.py",
        old="elif isinstance(generation, int) and generation != self.generation:",
        new="elif isinstance(generation, int) and generation > self.generation:",
        test=_CONTROL + "test_old_generations_are_refused_both_ways",
    ),
    Fault(
        id="old-incarnation-accepted",
        words="a process that was replaced may join again",
        file="epruntime/comm/control_server.py",
        old="        if info.incarnation != expected:\n",
        new="        if info.incarnation > expected:\n",
        test=_CONTROL + "test_refused_with_a_reason_and_without_harm[old incarnation]",
    ),
    Fault(
        id="wrong-secret-accepted",
        words="any 32 bytes prove the pool's secret",
        file="epruntime/comm/auth.py",
        old="return isinstance(given, bytes) and hmac.compare_digest(expected, given)",
        new="return isinstance(given, bytes) and len(expected) == len(given)",
        test=_CONTROL + "test_refused_with_a_reason_and_without_harm[wrong secret]",
    ),
    Fault(
        id="proof-without-claims",
        words="a rank's proof does not cover what it says of itself",
        file="epruntime/comm/auth.py",
        old='b"%d" % slot, b"%d" % incarnation, claims)',
        new='b"%d" % slot, b"%d" % incarnation)',
        test=_CONTROL + "test_the_proof_covers_the_claims",
    ),
    Fault(
        id="oversized-frame-accepted",
        words="a stranger may send a frame as large as a rank's",
        file="epruntime/comm/frames.py",
        old="            if size > self.limit:\n",
        new="            if size > MAX_FRAME_BYTES:\n",
        test=_CONTROL + "test_strangers_are_cut_off_and_others_do_not_notice[oversized]",
    ),
    Fault(
        id="silence-unnoticed",
        words="a rank that was stopped is not noticed while nothing is asked of it",
        file="epruntime/launchers/pool.py",
        old="silent_s > self.heartbeat_timeout_s:",
        new="silent_s > 1000 * self.heartbeat_timeout_s:",
        test="tests/distributed/test_death_matrix.py::test_requests_end_in_time_by_name_and_the_engine_comes_back[idle-19]",
    ),
    Fault(
        id="claims-unchecked",
        words="a rank may claim a kernel signature that is no table of texts",
        file="epruntime/comm/control_server.py",
        old="            _check_types(info)\n",
        new="",
        test="tests/unit/test_fuzz_control.py::test_identities",
    ),
    Fault(
        id="overlapping-tensors-accepted",
        words="two tensors of a checkpoint may share bytes",
        file="epruntime/models/safetensors.py",
        old="        if entry.offset < position:\n",
        new="        if entry.offset < 0:\n",
        test="tests/unit/test_models_safetensors.py::test_damaged_header",
    ),
)

SERVING = (
    Fault(
        id="healthy-while-stalled",
        words="health says serving while a rank makes no step",
        file="epruntime/serve/gate.py",
        old="self._engine_status.state is EngineState.READY\n",
        new="self._engine_status.state is not EngineState.RESTARTING\n",
        test="tests/serve/test_grpc_health.py::test_check_and_watch_follow_gate_and_engine",
    ),
    Fault(
        id="metrics-without-token",
        words="metrics are open to everyone although access tokens are set",
        file="epruntime/serve/openai/envelope.py",
        old='"/health", "/ping", "/version"',
        new='"/health", "/ping", "/version", "/metrics"',
        test="tests/serve/test_openai_server.py::test_a_token_is_needed_where_one_is_set",
    ),
    Fault(
        id="http-healthy-while-stalled",
        words="HTTP's /health says 200 as soon as the model is loaded",
        file="epruntime/serve/openai/endpoints.py",
        old="        if not self._gate.serving:\n",
        new="        if self._gate.engine is None:\n",
        test="tests/serve/test_openai_server.py::test_health_follows_server_and_ranks",
    ),
    Fault(
        id="token-prefix-accepted",
        words="the beginning of an access token is enough",
        file="epruntime/serve/access.py",
        old="hmac.compare_digest(offered, token)",
        new="token.startswith(offered)",
        test="tests/unit/test_access.py::test_what_is_near_does_not",
    ),
    Fault(
        id="token-with-a-tail-accepted",
        words="anything that begins with an access token is enough",
        file="epruntime/serve/access.py",
        old="hmac.compare_digest(offered, token)",
        new="offered.startswith(token)",
        test="tests/unit/test_access.py::test_what_is_near_does_not",
    ),
    Fault(
        id="retry-after-first-token",
        words="a request that has begun to answer is sent again",
        file="epruntime/client/sync.py",
        old="None if self._began else self._attempts.wait_s(error)",
        new="self._attempts.wait_s(error)",
        test="tests/serve/test_client_retry.py::test_after_the_first_chunk_never[sync]",
    ),
    Fault(
        id="secret-in-a-bug-report",
        words="collect-env shows tokens",
        file="epruntime/cli/software_facts.py",
        old="        return _HIDDEN\n",
        new="        return value\n",
        test="tests/unit/test_collect_env.py::test_secrets",
    ),
)

PREFLIGHT = (
    Fault(
        id="payload-without-source",
        words="preflight's payload does not depend on who sends it",
        file="epruntime/preflight/payload.py",
        old="key = (source * 0x9E37_79B1 + destination",
        new="key = (destination",
        test="tests/unit/test_preflight_exchange.py::test_payloads_of_all_pairs_differ_and_rows_do_not_depend_on_their_number",
    ),
    Fault(
        id="rows-not-compared",
        words="preflight compares what rows say of themselves, and not all their bytes",
        file="epruntime/preflight/payload.py",
        old="    wrong_NB = rows_NB != expected_NB\n",
        new="    wrong_NB = rows_NB[:, :MIN_ROW_BYTES] != expected_NB[:, :MIN_ROW_BYTES]\n",
        test="tests/unit/test_preflight_exchange.py::test_a_flipped_bit_is_found_with_its_place",
    ),
    Fault(
        id="memory-of-one-rank-only",
        words="preflight does not add up what the ranks of a host need",
        file="epruntime/preflight/checks_hosts.py",
        old="sure, total = sum(rank.need.sure for rank in members)",
        new="sure, total = max(rank.need.sure for rank in members)",
        test="tests/unit/test_preflight_checks.py::test_memory_of_ranks_on_one_host_adds_up",
    ),
    Fault(
        id="any-greeting-is-right",
        words="preflight takes a rank of another run for the one that was called",
        file="epruntime/worker/peer_calls.py",
        old="slot if theirs == nonce else -1",
        new="slot",
        test="tests/unit/test_peer_calls.py::test_each_call_is_answered_by_its_rank",
    ),
    Fault(
        id="preflight-errors-ignored",
        words="the start goes on although preflight has found errors",
        file="epruntime/preflight/verdict.py",
        old="        return not self.errors\n",
        new="        return True\n",
        test="tests/unit/test_preflight_verdict.py::test_errors_decide_and_come_first",
    ),
)

FAULTS = (*EXPERTS, *SAMPLING, *KERNELS, *SCHEDULING, *CONTROL, *SERVING, *PREFLIGHT)
