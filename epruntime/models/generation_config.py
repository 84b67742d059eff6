"""GenerationConfig: end-of-sequence ids and sampling defaults of a checkpoint's generation_config.json.

The file is read as it is: transformers' own class would fill in what the checkpoint does not say. A wrong
end-of-sequence id would let outputs run on, so it refuses the checkpoint; a sampling default that makes no sense is
left out, since every request may say its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epruntime.errors import CheckpointError, InvalidRequestError
from epruntime.models.adapter import as_ids
from epruntime.models.checkpoint import read_json
from epruntime.sampling_params import SamplingParams

FILE = "generation_config.json"

#: field of the file -> field of SamplingParams
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


#: Fields by which transformers' `generate` would choose other tokens, and which are not read -> values without effect.
_UNREAD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "bad_words_ids",
            "begin_suppress_tokens",
            "dola_layers",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "penalty_alpha",
            "sequence_bias",
            "stop_strings",
            "suppress_tokens",
            "top_h",
            "watermarking_config",
        ),
        ([], {}, ()),
    ),
    **dict.fromkeys(
        ("epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens", "no_repeat_ngram_size", "diversity_penalty"),
        (0,),
    ),
    **dict.fromkeys(("guidance_scale", "num_beams", "num_beam_groups", "typical_p"), (1,)),
}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What the file says.

    Attributes:
        eos_token_ids: as listed.
        sampling: SamplingParams field -> value, for the fields that the file has.
        ignored: field of the file -> why its value is left out.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)


def read_generation_config(path: Path) -> GenerationConfig:
    """Reads a checkpoint directory's file; all empty if there is none.

    `do_sample: false` becomes temperature 0, whatever temperature stands beside it; where `do_sample` is absent the
    temperature counts. null is as absent.

    Raises:
        CheckpointError: the file is no JSON object, or its eos_token_id no token id or list of them.
    """
    if not (path / FILE).exists():
        return GenerationConfig()
    raw = read_json(path / FILE)
    eos = as_ids(raw.get("eos_token_id"))
    if not all(type(token) is int for token in eos):
        raise CheckpointError(
            f"{path / FILE}: eos_token_id is {raw['eos_token_id']!r}, not a token id or a list of them"
        )
    sampling: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for name, ours in _FIELDS.items():
        value = raw.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except InvalidRequestError as error:
            ignored[name] = str(error)
        else:
            sampling[ours] = value
    for name, without_effect in _UNREAD.items():
        value = raw.get(name)
        if value is not None and value not in without_effect:
            ignored[name] = f"{name}={value!r}: not read; what it asks for must come with the request"
    do_sample = raw.get("do_sample")
    if do_sample is False:
        sampling["temperature"] = 0.0
    elif do_sample not in (None, True):
        ignored["do_sample"] = f"do_sample={do_sample!r}: must be true or false"
    return GenerationConfig(eos_token_ids=tuple(eos), sampling=sampling, ignored=ignored)
