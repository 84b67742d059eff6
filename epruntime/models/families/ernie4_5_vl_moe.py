"""ERNIE 4.5 VL: a layer has experts for text and experts for images, each with a router. Text has its own alone.

A checkpoint (transformers, conversion_mapping.py) numbers the experts of a layer through: of 2 E, the first E are those
for text. Their weights are of other sizes than those for images, so a rank that read the wrong ones would notice. The
routers' biases are the two rows of one tensor; their weights are tensors of their own, `gate.weight` for text.
"""

from __future__ import annotations

import re
from typing import Any

from epruntime.models.families.experts import modules_of
from epruntime.models.families.layout import Layout

_EXPERT = re.compile(r"\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(?:gate|up|down)_proj\.weight$")
_BIAS = "moe_statics.e_score_correction_bias"
#: The rest of what is for images, as it is published and as transformers names it.
_FOR_IMAGES = re.compile(
    r"\.layers\.(\d+)\.mlp\.(?:gate\.weight_1|vision_moe\.(?:gate\.weight|experts\.(?:gate_up|down)_proj|gate\."
    rf"{re.escape(_BIAS)}))$"
)


def adapt(model: Any, config: Any) -> Layout:
    """Takes the experts for images out: a block calls them for tokens that it is told to be of an image."""
    if "sparse" not in config.mlp_layer_types:
        return Layout()  # a model with experts in no layer is refused where those of all families are
    for _, block in modules_of(model, "Ernie4_5_VLMoeMoeBlock"):
        del block.vision_moe
    for _, rotary in modules_of(model, "Ernie4_5_VLMoeTextRotaryEmbedding"):
        kept = vars(rotary).pop("original_inv_freq", None)
        if kept is not None:  # transformers 5.16 has it as a plain attribute, and gives values to buffers
            rotary.register_buffer("original_inv_freq", kept, persistent=False)
    num_experts = int(config.moe_num_experts)
    sparse = {str(layer) for layer, kind in enumerate(config.mlp_layer_types) if kind == "sparse"}

    def unused(key: str) -> bool:
        expert, other = _EXPERT.search(key), _FOR_IMAGES.search(key)
        if expert is not None:
            return expert[1] in sparse and num_experts <= int(expert[2]) < 2 * num_experts
        return other is not None and other[1] in sparse

    return Layout(
        stacked={
            "text_moe.experts.gate_up_proj": ("experts.*.gate_proj.weight", "experts.*.up_proj.weight"),
            "text_moe.experts.down_proj": ("experts.*.down_proj.weight",),
        },
        parts={f".mlp.{_BIAS}": (f".mlp.text_moe.gate.{_BIAS}", f".mlp.vision_moe.gate.{_BIAS}")},
        unused=unused,
    )
