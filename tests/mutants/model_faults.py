"""Faults of what computes tokens: experts, attention and loading; sampling and text."""

from __future__ import annotations

from faults import Fault

_ASYNC = "tests/unit/test_async_llm.py::"

EXPERTS = (
    Fault(
        id="shared-expert-twice",
        words="shared experts are added twice",
        file="epruntime/models/adapter.py",
        old="    model.set_experts_implementation(name)\n",
        new="""    model.set_experts_implementation(name)
    for child, module in model.named_modules():
        if child.endswith(("shared_expert", "shared_experts")):
            module.register_forward_hook(lambda module, args, out: 2 * out)
""",
        test="tests/e2e/test_conformance.py::test_equals_transformers_fp32[deepseek_v3]",
    ),
    Fault(
        id="renormalisation-lost",
        words="the router's top-k weights are not renormalised",
        file="epruntime/models/adapter.py",
        old="        part.use_cache = False\n",
        new="        part.use_cache = part.norm_topk_prob = False\n",
        test="tests/e2e/test_conformance.py::test_equals_transformers_fp32[qwen3_moe-norm_topk_prob]",
    ),
    Fault(
        id="bias-once-per-rank",
        words="an expert's output bias is added once per token and rank, not once per expert",
        file="epruntime/moe/experts/base.py",
        old="            y_MH += weights.down_bias_SH[groups.slot_M]\n",
        new="""            first_M = ((rows.slots_NK >= 0).cumsum(1) == 1)[rows.slots_NK >= 0]
            first_M = groups.place_M[first_M]
            y_MH[first_M] += weights.down_bias_SH[groups.slot_M[first_M]]
""",
        test="tests/distributed/test_moe_matrix.py::test_layer_equals_fp64[biased-reference-local-1]",
    ),
    Fault(
        id="weights-applied-at-experts-and-source",
        words="router weights count twice",
        file="epruntime/moe/dispatch.py",
        old="combine_rows(results_MH, index_TK, topk_weights_TK.float())",
        new="combine_rows(results_MH, index_TK, topk_weights_TK.float().square())",
        test="tests/distributed/test_moe_matrix.py::test_layer_equals_fp64[uneven-reference-local-1]",
    ),
    Fault(
        id="weights-rounded-to-bf16",
        words="router weights are rounded to the model's dtype before they are applied",
        file="epruntime/moe/dispatch.py",
        old="combine_rows(results_MH, index_TK, topk_weights_TK.float())",
        new="combine_rows(results_MH, index_TK, topk_weights_TK.to(results_MH.dtype).float())",
        test="tests/unit/test_moe_bf16.py::test_bits_are_those_of_fp64_rounded_where_documented[plain-reference-1]",
    ),
    Fault(
        id="weights-rounded-at-the-hook",
        words="what transformers' code calls for its experts rounds the router's weights to the model's dtype",
        file="epruntime/models/adapter.py",
        old="    return layer.forward(hidden_states, top_k_index, top_k_weights)\n",
        new="    return layer.forward(hidden_states, top_k_index, top_k_weights.to(hidden_states.dtype))\n",
        test="tests/unit/test_moe_bf16.py::test_a_block_has_the_bits_of_transformers_with_exact_experts",
    ),
    Fault(
        id="routed-output-scaled",
        words="routed experts' results are 0.3 % too large",
        file="epruntime/moe/dispatch.py",
        old="combine_rows(results_MH, index_TK, topk_weights_TK.float())",
        new="combine_rows(results_MH, index_TK, topk_weights_TK.float() * 1.003)",
        test="tests/unit/test_moe_bf16.py::test_bits_are_those_of_fp64_rounded_where_documented[plain-reference-1]",
    ),
    Fault(
        id="one-row-of-thousands-doubled",
        words="in a long chunk one row's routed output is doubled in the last layer",
        file="epruntime/moe/layer.py",
        old="        return dispatcher.finalize(handle, topk_weights_TK)\n",
        new="""        y_TH = dispatcher.finalize(handle, topk_weights_TK)
        if self.layer_index == 1 and len(y_TH) > 1000:
            y_TH[333] *= 2
        return y_TH
""",
        test="tests/e2e/test_long_context.py::test_long_sequences_equal_transformers[llama3]",
    ),
    Fault(
        id="long-factors-lost",
        words="longrope keeps the factors of short sequences for long ones",
        file="epruntime/models/adapter.py",
        old="        part.use_cache = False\n",
        new="""        part.use_cache = False
        if "long_factor" in (parameters := getattr(part, "rope_parameters", None) or {}):
            parameters["long_factor"] = parameters["short_factor"]
""",
        test="tests/e2e/test_long_context.py::test_long_sequences_equal_transformers[longrope]",
    ),
    Fault(
        id="combine-order",
        words="expert outputs are added in another order than k order",
        file="epruntime/ops/combine.py",
        old="extension.combine_rows(rows_MH, index_TK, weights_TK)",
        new="extension.combine_rows(rows_MH, index_TK.flip(1).contiguous(), weights_TK.flip(1).contiguous())",
        test="tests/kernels/test_combine_rows.py::test_adds_in_k_order[portable]",
    ),
    Fault(
        id="not-routed-computed",
        words="expert id -1 (not routed) is computed as an expert",
        file="epruntime/moe/rows.py",
        old="""[*rank, [placement.world_size] * self.period], dtype=torch.int64, device=device)
        self.slot_EC = torch.tensor([*slot, [-1] * self.period]""",
        new="""[*rank, [0] * self.period], dtype=torch.int64, device=device)
        self.slot_EC = torch.tensor([*slot, [0] * self.period]""",
        test="tests/unit/test_placement.py::test_row_plan_on_paper",
    ),
    Fault(
        id="placement-permuted",
        words="rows go to the right rank and to another expert's slot there",
        file="epruntime/moe/rows.py",
        old="slot = [[placement.physical_to_slot[p] for p in row] for row in columns]",
        new="slot = [[placement.physical_to_slot[p] for p in row] for row in reversed(columns)]",
        test="tests/distributed/test_moe_matrix.py::test_layer_equals_fp64[uneven-reference-local-1]",
    ),
    Fault(
        id="copies-in-the-slot-of-the-first",
        words="rows for a further copy of an expert name the slot that the first copy has on its own rank",
        file="epruntime/moe/rows.py",
        old="slot = [[placement.physical_to_slot[p] for p in row] for row in columns]",
        new="slot = [[placement.physical_to_slot[row[0]] for _ in row] for row in columns]",
        test="tests/distributed/test_moe_matrix.py::test_layer_equals_fp64[redundant-reference-gloo-2]",
    ),
    Fault(
        id="copies-never-used",
        words="all rows go to the first copy of an expert",
        file="epruntime/moe/rows.py",
        old="columns = [[ids[c % len(ids)] for c in range(self.period)] for ids in placement.replicas]",
        new="columns = [[ids[0] for c in range(self.period)] for ids in placement.replicas]",
        test="tests/distributed/test_moe_matrix.py::test_statistics[redundant-gloo-2]",
    ),
    Fault(
        id="second-slot-of-an-expert-left-empty",
        words="a rank that holds an expert twice fills the second slot with another one",
        file="epruntime/models/weights.py",
        old="out_S[slot].copy_(out_S[first])",
        new="out_S[slot].copy_(out_S[0])",
        test="tests/unit/test_models_loading.py::test_already_fused_checkpoint",
    ),
    Fault(
        id="activations-by-batch",
        words="activations are computed on what there is: the last elements by scalar code, with other bits",
        file="epruntime/ops/row_independent.py",
        old="        size = padded_elements(n, torch.get_num_threads())\n",
        new="        size = n\n",
        test="tests/kernels/test_batch_invariant.py::test_rows_1_to_70_on_threads_1_to_4[silu-fp32]",
    ),
    Fault(
        id="sums-by-strides",
        words="sums are taken in the order that a tensor's strides suggest, which differ for a single row",
        file="epruntime/ops/row_independent.py",
        old="exact or (x.is_contiguous() and not whole and",
        new="exact or (not whole and",
        test="tests/kernels/test_batch_invariant.py::test_rows_1_to_70_on_threads_1_to_4[mean.dim-fp32]",
    ),
    Fault(
        id="parts-of-threads-forgotten",
        words="the buffer of an activation is whole vector steps, but a thread's part of it is not",
        file="epruntime/ops/row_independent.py",
        old="step = STEP * math.lcm(*parts)",
        new="step = STEP + 0 * math.lcm(*parts)",
        test="tests/kernels/test_batch_invariant.py::test_every_thread_s_part_is_whole_vector_steps[3]",
    ),
    Fault(
        id="strict-installs-nothing",
        words="invariance=strict leaves torch's own ops in place",
        file="epruntime/worker/generation.py",
        old="            batch_invariant.install()\n        try:\n",
        new="            pass\n        try:\n",
        test="tests/unit/test_generation_strict.py::test_strict_installs_and_takes_back",
    ),
    Fault(
        id="wrong-expert-slice",
        words="a rank reads the first experts of a fused tensor instead of its own",
        file="epruntime/models/weights.py",
        old="reader.read(self.entry, first, last, out[slot : slot + last - first])",
        new="reader.read(self.entry, slot, slot + last - first, out[slot : slot + last - first])",
        test="tests/unit/test_models_loading.py::test_already_fused_checkpoint",
    ),
    Fault(
        id="few-rows-by-another-kernel",
        words="products of few rows are computed in another order",
        file="epruntime/ops/gemm.py",
        old="extension.matmul(a_MK, b_KN, bias_N)",
        new="""(
            extension.matmul(a_MK, b_KN, bias_N)
            if a_MK.shape[0] > 3
            else extension.matmul(a_MK.flip(1), b_KN.flip(0), bias_N)
        )""",
        test="tests/kernels/test_gemm.py::test_rows_1_to_70_on_threads_1_to_4",
    ),
    Fault(
        id="products-split-over-k",
        words="two threads add up half of k each",
        file="epruntime/ops/gemm.py",
        old="extension.matmul(a_MK, b_KN, bias_N)",
        new="""extension.matmul(a_MK, b_KN, bias_N)
        if torch.get_num_threads() == 2 and a_MK.dtype == torch.float32:
            half = a_MK.shape[1] // 2
            result = extension.matmul(a_MK[:, :half], b_KN[:half], None)
            result += extension.matmul(a_MK[:, half:], b_KN[half:], bias_N)""",
        test="tests/kernels/test_gemm.py::test_rows_1_to_70_on_threads_1_to_4",
    ),
    Fault(
        id="group-takes-the-next-row",
        words="a group of rows is multiplied by the matrix of the group before it in its first row",
        file="epruntime/ops/gemm.py",
        old="extension.grouped_matmul(x_PI, matrix_SIO, ends_S)",
        new="extension.grouped_matmul(x_PI, matrix_SIO, (ends_S + 1).clamp(max=x_PI.shape[0]))",
        test="tests/kernels/test_gemm.py::test_groups_are_their_products",
    ),
    Fault(
        id="grouped-mm-under-strict",
        words="invariance=strict takes a product whose kernel depends on the number of rows",
        file="epruntime/moe/experts/grouped_mm.py",
        old="        if strict:\n",
        new="        if False:\n",
        test="tests/unit/test_moe_experts.py::test_selection",
    ),
)

SAMPLING = (
    Fault(
        id="penalty-over-prompt",
        words="presence and frequency penalties count the prompt, too",
        file="epruntime/worker/logit_adjuster.py",
        old="        output = tokens[num_prompt_tokens:]\n",
        new="        output = tokens\n",
        test="tests/unit/test_logit_adjuster.py::test_the_order_on_paper",
    ),
    Fault(
        id="repetition-penalty-inverted",
        words="negative logits are divided by the repetition penalty, positive ones multiplied",
        file="epruntime/worker/logit_adjuster.py",
        old="np.where(seen_D < 0, ",
        new="np.where(seen_D >= 0, ",
        test="tests/unit/test_logit_adjuster.py::test_the_repetition_penalty_is_transformers",
    ),
    Fault(
        id="min-tokens-ignored",
        words="end-of-sequence may be chosen before min_tokens",
        file="epruntime/worker/logit_adjuster.py",
        old="if self._num_output < self._min_tokens:",
        new="if self._num_output < 0:",
        test="tests/unit/test_logit_adjuster.py::test_min_tokens_is_transformers_min_new_tokens",
    ),
    Fault(
        id="top-p-before-temperature",
        words="the nucleus is cut before the temperature is applied",
        file="epruntime/worker/sampler.py",
        old="kept_C = _nucleus(scaled_V, kept_C, spec.top_p)",
        new="kept_C = _nucleus(row_V, kept_C, spec.top_p)",
        test="tests/unit/test_sampler.py::test_the_kept_set_equals_transformers",
    ),
    Fault(
        id="min-p-of-the-unscaled",
        words="min_p keeps by rank among all tokens, not among those that top_k and top_p left",
        file="epruntime/worker/sampler.py",
        old="masked_V = _masked(scaled_V, kept_C)\n        probs_V",
        new="masked_V = _masked(scaled_V, None)\n        probs_V",
        test="tests/unit/test_logit_adjuster.py::test_the_kept_set_equals_transformers_with_min_p",
    ),
    Fault(
        id="draw-without-position",
        words="every position of a request draws the same random number",
        file="epruntime/worker/sampler.py",
        old="uniform(spec.seed, row.position)",
        new="uniform(spec.seed, 0)",
        test="tests/unit/test_sampler.py::test_draws_follow_the_exact_distribution",
    ),
    Fault(
        id="logprob-of-modified-logits",
        words="log-probabilities are told of the logits after penalties and bias",
        file="epruntime/worker/sampler.py",
        old="logprobs[i] = token_logprobs(row_V, token, spec.logprobs)",
        new="logprobs[i] = token_logprobs(adjusted_V, token, spec.logprobs)",
        test="tests/unit/test_logit_adjuster.py::test_greedy_obeys_and_logprobs_are_those_of_the_unmodified_logits",
    ),
    Fault(
        id="nan-logits-sampled",
        words="a row of NaN yields a token",
        file="epruntime/worker/sampler.py",
        old="    if np.isfinite(largest):\n",
        new="    if np.isfinite(largest) or position:\n",
        test="tests/unit/test_sampler.py::test_a_bad_row_is_an_error_of_that_row_only",
    ),
    Fault(
        id="prompt-logprobs-off-by-one",
        words="a prompt row tells the probability of its own token instead of the next one",
        file="epruntime/worker/input_batch.py",
        old="ids = request.tokens[first + 1 : first + 1 + num]",
        new="ids = request.tokens[first : first + num]",
        test="tests/unit/test_runner_prompt_logprobs.py::test_in_any_chunks",
    ),
    Fault(
        id="seed-reused",
        words="all n sequences of a request use its seed",
        file="epruntime/engine/request_state.py",
        old="seed=derive_seed(request.spec.seed, s.index)",
        new="seed=request.spec.seed",
        test=_ASYNC + "test_n_sequences_equal_n_requests_with_derived_seeds",
    ),
    Fault(
        id="seeds-collide",
        words="derived seeds of neighbouring requests are the same",
        file="epruntime/sampling_params.py",
        old="    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64\n",
        new="    z = (seed + index) & _MASK64\n",
        test="tests/unit/test_derive_seed.py::test_known_answers",
    ),
    Fault(
        id="model-eos-ignored",
        words="end-of-sequence ids of generation_config.json are not used",
        file="epruntime/models/loader.py",
        old="eos.end_ids(config, raw, generation.eos_token_ids)",
        new="eos.end_ids(config, raw, ())",
        test="tests/unit/test_models_loading.py::test_info",
    ),
    Fault(
        id="head-meets-first-rows",
        words="a forward that is not told of which rows logits are wanted is handed the first ones",
        file="epruntime/models/replay.py",
        old="hidden_1TH[:, rows_N]",
        new="hidden_1TH[:, : len(rows_N)]",
        test="tests/unit/test_models_logit_rows.py::test_rows_equal_those_of_a_class_that_is_told_of_them",
    ),
    Fault(
        id="default-end-of-sequence",
        words="outputs of a multimodal checkpoint end at an id that no file names, its language model class's default",
        file="epruntime/models/eos.py",
        old="written.get(_FIELD) is not None), [])",
        new="getattr(part, _FIELD, None) is not None), [])",
        test="tests/unit/test_models_eos.py::test_of_a_multimodal_checkpoint",
    ),
    Fault(
        id="head-tied-by-itself",
        words="whether a head is tied is taken from the language model's own configuration",
        file="epruntime/models/text_part.py",
        old="    language.tie_word_embeddings = tied.get(head) == table or tied.get(table) == head\n",
        new="",
        test="tests/unit/test_text_part.py::test_a_head_is_tied_where_it_is_in_the_whole_model",
    ),
    Fault(
        id="masks-of-a-cache",
        words="a mask that depends on what the cache holds is taken for what it is without one",
        file="epruntime/models/probe.py",
        old="    if not recorder.asked_for_layers:\n        return\n",
        new="    return\n",
        test="tests/unit/test_models_survey.py::test_the_part_that_is_not_served_is_refused_with_the_reason",
    ),
    Fault(
        id="stop-string-leaked",
        words="text that begins a stop string is shown before it is known whether it is one",
        file="epruntime/engine/detokenizer.py",
        old="        cut = self._first_possible(pending)\n",
        new="        cut = len(pending)\n",
        test="tests/unit/test_stop_strings.py::test_by_hand",
    ),
    Fault(
        id="bos-twice",
        words="a prompt that begins with the tokenizer's BOS gets a second one",
        file="epruntime/engine/tokenizer.py",
        old="            del ids[:extra]\n",
        new="            del ids[:0]\n",
        test="tests/unit/test_tokenizer_text.py::test_one_bos_however_the_text_begins",
    ),
    Fault(
        id="half-characters-shown",
        words="bytes of an unfinished character are shown as replacement characters",
        file="epruntime/engine/detokenizer.py",
        old="        if fresh and fresh[-1] == _REPLACEMENT:\n",
        new="        if not fresh:\n",
        test="tests/unit/test_detokenizer.py::test_pieces_join_to_the_text_and_hold_no_half_character",
    ),
)
