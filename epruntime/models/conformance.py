"""What is served: model types, with the features that a conformance test covers for each.

`tests/e2e/test_conformance.py` runs every row against transformers and fails if a row claims a feature that its
cases do not reach. What is in no row is refused.
"""

from __future__ import annotations

#: Types of rotary embedding that the tests cover. They are transformers' own code and depend on positions alone.
COVERED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})

#: model_type -> features. Those of attention: window, chunk, sinks, softcap, latent (the cache keeps latents). Those
#: of the layers: dense (layers without routed experts among them).
COVERED: dict[str, frozenset[str]] = {
}
