"""Prompt seeds per family, one per length of epruntime.testing.prompts.LENGTHS.

Chosen by the reference's margins alone: `python -m epruntime.testing.prompts FAMILY...` prints these lines.
"""

SEEDS = {
    "mixtral": (0, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0),
    "qwen2_moe": (0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 6, 0),
    "qwen3_moe": (1, 0, 0, 0, 0, 1, 1, 1, 0, 4, 0, 1),
    "olmoe": (0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0),
    "granitemoe": (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0),
    "deepseek_v2": (0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0),
    "deepseek_v3": (0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1),
    "gpt_oss": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "phimoe": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "glm4_moe": (0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 2),
    "ernie4_5_moe": (0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0),
}
