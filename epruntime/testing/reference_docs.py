"""The parts of the documentation that are made from code: options, environment variables, served architectures.

`python -m epruntime.testing.reference_docs` writes them; a test fails when they are out of step.
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from epruntime import envs
from epruntime.cli.flags import attribute_docs, flag_of
from epruntime.config import EngineConfig, ServeConfig
from epruntime.config.engine import has_default
from epruntime.config.verify import VerifyConfig
from epruntime.models import text_part
from epruntime.models.conformance import COVERED, PARTLY, SINCE
from epruntime.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]

#: file -> what its generated part is made by.
_MODEL_TABLES = {
    "README.md": ("model type", "attention", "layers", "needs transformers"),
    "README.zh-CN.md": ("模型类型", "注意力", "层", "所需 transformers"),
}
_WORDS = {
    "README.md": {
        "window": "sliding window",
        "sinks": "sinks",
        "softcap": "soft cap",
        "chunk": "chunked",
        "latent": "multi-head latent (MLA)",
        "shared": "latents shared by layers",
        "sparse": "sparse by an indexer (DSA)",
        "": "full",
        "dense": "some are dense",
        "moe": "all are MoE",
        "partly": " (served if all layers have it)",
        "text": "; text alone",
        "since": "{}.{} or newer",
    },
    "README.zh-CN.md": {
        "window": "滑动窗口",
        "sinks": "sink",
        "softcap": "soft cap",
        "chunk": "分块",
        "latent": "MLA 多头潜在注意力",
        "shared": "层间共享潜在向量",
        "sparse": "稀疏 (DSA 索引器)",
        "": "全注意力",
        "dense": "含稠密层",
        "moe": "全部为 MoE",
        "partly": " (每层皆须如此)",
        "text": "; 仅文本",
        "since": "{}.{} 起",
    },
}
_BEGIN, _END = "<!-- served architectures: generated -->", "<!-- end of the generated part -->"


def configuration() -> str:
    """docs/configuration.md."""
    parts = [
        "# Configuration",
        "Generated from the code by `python -m epruntime.testing.reference_docs`; edit the dataclasses, not this file.",
        "Every option is a keyword of `LLM` and `AsyncLLM`, and a flag of `epruntime serve` and of `epruntime "
        "generate --model` (`max_num_seqs` is `--max-num-seqs`) unless the table says otherwise. Unknown keywords are "
        "a `TypeError`; values that cannot work, a `ConfigError` that says what to do.",
    ]
    commands: dict[type, str] = {ServeConfig: "serve", VerifyConfig: "verify"}
    for kind in (*EngineConfig.SECTIONS.values(), *commands):
        only = f" (`epruntime {commands[kind]}` only)" if kind in commands else ""
        parts.append(f"## {kind.__name__.removesuffix('Config')}: {_first_line(kind)}{only}")
        hints = typing.get_type_hints(kind)
        parts.append(
            _table(
                ("option", "flag", "type", "default", "meaning"),
                [
                    (
                        f"`{f.name}`",
                        _flag(f),
                        _type(hints[f.name], f.metadata.get("choices")),
                        _default(f),
                        f.metadata["help"],
                    )
                    for f in fields(kind)
                ],
            )
        )
    parts.append("## Sampling")
    parts.append(
        "Fields of `SamplingParams`, keywords of the client's `generate`, `stream` and `chat`, and flags of "
        "`epruntime generate` and `chat` (which have their own default for `max_tokens`)."
    )
    hints, docs = typing.get_type_hints(SamplingParams), attribute_docs(SamplingParams)
    parts.append(
        _table(
            ("field", "type", "default", "meaning"),
            [
                (f"`{f.name}`", _type(hints[f.name], None), _default(f), docs.get(f.name, ""))
                for f in fields(SamplingParams)
            ],
        )
    )
    parts.append("## Environment variables")
    parts.append("For debugging, and for a secret; a value that does not parse is an error.")
    parts.append(
        _table(
            ("variable", "default", "meaning"),
            [
                (
                    f"`{name}`",
                    f"`{int(default) if isinstance(default, bool) else default}`" if default != "" else "",
                    meaning,
                )
                for name, (_, default, meaning) in envs.VARIABLES.items()
            ],
        )
    )
    return "\n\n".join(parts) + "\n"


def models_table(file: str) -> str:
    """The table of served architectures of a README, in its language."""
    words = _WORDS[file]
    rows = []
    for model_type, features in sorted(COVERED.items()):
        attention = [
            words[name]
            for name in ("latent", "shared", "sparse", "window", "chunk", "sinks", "softcap")
            if name in features
        ]
        kind = (", ".join(attention) or words[""]) + (words["partly"] if model_type in PARTLY else "")
        if text_part.has_language_part(CONFIG_MAPPING[model_type]):
            kind += words["text"]
        since = words["since"].format(*SINCE[model_type]) if model_type in SINCE else ""
        rows.append((f"`{model_type}`", kind, words["dense" if "dense" in features else "moe"], since))
    return _table(_MODEL_TABLES[file], rows)


def expected() -> dict[Path, str]:
    """Every file with a generated part -> its text as it should be.

    Raises:
        ValueError: a README has lost its markers.
    """
    texts = {ROOT / "docs" / "configuration.md": configuration()}
    for file in _MODEL_TABLES:
        before, found, rest = (ROOT / file).read_text(encoding="utf-8").partition(_BEGIN)
        _, closed, after = rest.partition(_END)
        if not found or not closed:
            raise ValueError(f"{file} needs the lines {_BEGIN!r} and {_END!r}")
        texts[ROOT / file] = f"{before}{_BEGIN}\n\n{models_table(file)}\n\n{_END}{after}"
    return texts


def main() -> int:
    for path, text in expected().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _first_line(kind: type) -> str:
    line = (kind.__doc__ or "").splitlines()[0].rstrip(".")
    return line[0].lower() + line[1:]


def _flag(f: Any) -> str:
    if f.metadata.get("positional"):
        return "positional"
    return f"`{flag_of(f.name)}`" if f.metadata.get("cli", True) else "keyword only"


def _type(hint: Any, choices: tuple[str, ...] | None) -> str:
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return f"`{re.sub(r'(, [.]{3})', '', text.replace('tuple[', 'list['))}`".replace(" | None", "")


def _default(f: Any) -> str:
    if not has_default(f):
        return "required"
    default = f.default if f.default is not MISSING else f.default_factory()
    return "" if default in (None, (), {}) else f"`{default}`"


if __name__ == "__main__":
    sys.exit(main())
