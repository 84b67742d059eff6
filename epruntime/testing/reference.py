"""What transformers itself answers: one prompt at a time, greedy, and the margins that say how much equality proves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers

from epruntime.testing.margins import top1_margin, watch_selections


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Greedy continuations of some prompts.

    Attributes:
        tokens: new tokens per prompt. logprobs: natural log-probability of each of them.
        router_margin: least gap of any selection (experts, groups) in any forward.
        top1_margin: least gap between the best and the second logit at any new token.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    router_margin: float
    top1_margin: float


@torch.inference_mode()
def greedy_reference(
    model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int
) -> Reference:
    """Runs `model.generate` on each prompt alone, past any end-of-sequence token."""
    tokens, logprobs, top1 = [], [], float("inf")
    with watch_selections() as router:
        for prompt in prompts:
            ids_1P = torch.tensor([list(prompt)])
            out = model.generate(
                ids_1P,
                attention_mask=torch.ones_like(ids_1P),  # or it would take id 0 for padding
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                renormalize_logits=False,
            )
            logits = torch.cat(out.logits).float()
            new = out.sequences[0, len(prompt) :]
            tokens.append(new.tolist())
            logprobs.append(logits.log_softmax(-1).gather(1, new[:, None])[:, 0].tolist())
            top1 = min(top1, top1_margin(logits))
    return Reference(tokens=tokens, logprobs=logprobs, router_margin=router.least, top1_margin=top1)
