"""What is served: model types, with the features that a conformance test covers for each.

`tests/e2e/test_conformance.py` runs every row against transformers and fails if a row claims a feature that its
cases do not reach. What is in no row is refused.
"""

from __future__ import annotations

#: Types of rotary embedding that the tests cover. They are transformers' own code and depend on positions alone; the
#: last two on the length of the sequence too (`rope.py`). "ntk_alpha" is what hunyuan_v1_moe makes of "dynamic" with an
#: alpha.
COVERED_ROPE_TYPES = frozenset(
    {"default", "linear", "llama3", "yarn", "proportional", "ntk_alpha", "longrope", "dynamic"}
)

#: Types that the oldest supported transformers lacks, or has in another form (experts outside the experts interface, an
#: indexer with another signature) -> the first version that the tests ran on.
SINCE: dict[str, tuple[int, int]] = dict.fromkeys(
    (
        "aria",
        "aria_text",
        "axk2",
        "beam",
        "deepseek_ocr2",
        "deepseek_v32",
        "dots3_note",
        "dots3_note_text",
        "flint",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl",
        "kolibri1",
        "lara_mini",
        "minimax_m3_vl",
        "mistral_large4",
        "muse_spark",
        "sarvam_mla",
        "sarvam_moe",
        "unlimited_ocr",
    ),
    (5, 24),
)

#: Types that are served in part: what every layer must have, or the model is refused by name (`refusal.explained`).
_ALL_SOFTMAX = "softmax attention in every layer"
PARTLY: dict[str, str] = {
    **dict.fromkeys(
        (
            "granitemoehybrid",
            "jamba",
            "lara_mini",
            "lfm2_moe",
            "minimax",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_next",
        ),
        _ALL_SOFTMAX,
    ),
    "deepseek_v4": "sliding-window attention in every layer",
    "unlimited_ocr": "full attention in every layer",
}

#: Multimodal types whose configuration may name any language model -> the type of it that the tests cover.
LANGUAGES: dict[str, str] = {"internvl": "qwen3_moe", "kimi_k25": "deepseek_v3", "mistral3": "mistral4"}

#: model_type -> features. Those of attention: window, chunk, sinks, softcap, latent (the cache keeps latents),
#: sparse (an indexer selects keys), shared (a layer attends to the latents of another one). Those of the layers: dense
#: (layers without routed experts among them).
COVERED: dict[str, frozenset[str]] = {
    "afmoe": frozenset({"dense", "window"}),
    "aria": frozenset(),
    "aria_text": frozenset(),
    "axk1": frozenset({"dense", "latent"}),
    "axk2": frozenset({"dense", "latent", "sparse"}),
    "beam": frozenset({"dense", "window"}),
    "cohere2_moe": frozenset({"dense", "window"}),
    "dbrx": frozenset(),
    "deepseek_ocr2": frozenset({"dense"}),
    "deepseek_v2": frozenset({"dense", "latent"}),
    "deepseek_v3": frozenset({"dense", "latent"}),
    "deepseek_v32": frozenset({"dense", "latent", "sparse"}),
    "deepseek_v4": frozenset({"sinks", "window"}),
    "dots1": frozenset({"dense", "window"}),
    "dots3_note": frozenset({"dense", "latent", "sparse", "window"}),
    "dots3_note_text": frozenset({"dense", "latent", "sparse", "window"}),
    "ernie4_5_moe": frozenset({"dense"}),
    "ernie4_5_vl_moe": frozenset({"dense"}),
    "exaone_moe": frozenset({"dense", "window"}),
    "flex_olmo": frozenset(),
    "flint": frozenset({"dense", "sinks", "window"}),
    "gemma4": frozenset({"window"}),
    "gemma4_text": frozenset({"window"}),
    "glm4_moe": frozenset({"dense"}),
    "glm4_moe_lite": frozenset({"dense", "latent"}),
    "glm4v_moe": frozenset({"dense"}),
    "glm_moe_dsa": frozenset({"dense", "latent", "sparse"}),
    "gpt_oss": frozenset({"sinks", "window"}),
    "granitemoe": frozenset(),
    "granitemoe_swa": frozenset({"sinks", "window"}),
    "granitemoehybrid": frozenset(),
    "granitemoeshared": frozenset(),
    "hunyuan_v1_moe": frozenset(),
    "hy_v3": frozenset({"dense"}),
    "hy_v4": frozenset({"dense", "latent", "sinks", "sparse"}),
    "hy_v4_vl": frozenset({"dense", "latent", "sinks", "sparse"}),
    "internvl": frozenset({"dense", "window"}),
    "jamba": frozenset({"dense"}),
    "kimi_k25": frozenset({"dense", "latent"}),
    "kolibri1": frozenset({"window"}),
    "laguna": frozenset({"dense", "window"}),
    "lara_mini": frozenset({"window"}),
    "lfm2_moe": frozenset({"dense"}),
    "llama4": frozenset({"chunk", "dense"}),
    "llama4_text": frozenset({"chunk", "dense"}),
    "longcat_flash": frozenset({"latent"}),
    "mellum": frozenset({"dense", "window"}),
    "mimo_v2_flash": frozenset({"dense", "sinks", "window"}),
    "minimax": frozenset({"window"}),
    "minimax_m2": frozenset(),
    "minimax_m3_vl": frozenset({"dense"}),
    "minimax_m3_vl_text": frozenset({"dense"}),
    "mistral3": frozenset({"dense", "latent"}),
    "mistral4": frozenset({"dense", "latent"}),
    "mistral_large4": frozenset({"dense", "latent", "shared", "sparse"}),
    "mixtral": frozenset({"window"}),
    "muse_spark": frozenset({"dense", "window"}),
    "olmoe": frozenset(),
    "phimoe": frozenset({"window"}),
    "qwen2_moe": frozenset({"dense", "window"}),
    "qwen3_5_moe": frozenset(),
    "qwen3_5_moe_text": frozenset(),
    "qwen3_moe": frozenset({"dense", "window"}),
    "qwen3_next": frozenset({"dense"}),
    "qwen3_omni_moe": frozenset({"dense"}),
    "qwen3_omni_moe_thinker": frozenset({"dense"}),
    "qwen3_vl_moe": frozenset({"dense"}),
    "sarvam_mla": frozenset({"dense", "latent"}),
    "sarvam_moe": frozenset({"dense"}),
    "solar_open": frozenset(),
    "step3p7": frozenset({"dense", "window"}),
    "unlimited_ocr": frozenset({"dense"}),
}
