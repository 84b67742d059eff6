"""Checks of what is installed: versions, kernels, checkpoint. Pure functions: facts in, findings out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from epruntime.preflight.facts import RankFacts, Setting, hosts_of, slots_of
from epruntime.preflight.findings import Finding, finding

#: unequal ones may compute other bits, or not understand each other.
_SAME = ("epruntime", "torch", "transformers")


def check_versions(ranks: Sequence[RankFacts], setting: Setting) -> list[Finding]:
    """Every rank runs what the coordinator runs."""
    found = []
    for name in (*_SAME, "python"):
        ours = setting.versions.get(name, "")
        groups = _groups(ranks, lambda rank, name=name: rank.machine.versions.get(name, "none"))  # type: ignore[misc]
        for version, members in groups.items():
            if version == ours:
                continue
            found.append(
                finding(
                    "versions-differ" if name in _SAME else "python-differs",
                    slots=slots_of(members),
                    hosts=hosts_of(members),
                    found=f"{name} {version}",
                    expected=f"{name} {ours}, as the coordinator has",
                )
            )
    return found


def check_kernels(ranks: Sequence[RankFacts]) -> list[Finding]:
    """All ranks compute with the same kernels, and with the C++ ones."""
    if not ranks:
        return []
    found = []
    first = ranks[0]
    for rank in ranks[1:]:
        unequal = _unequal(first.machine.signature, rank.machine.signature)
        if unequal:
            found.append(
                finding(
                    "kernels-differ",
                    slots=(rank.slot,),
                    hosts=(rank.host,),
                    found="; ".join(f"{key} {theirs!r}" for key, (_, theirs) in unequal.items()),
                    expected="; ".join(f"{key} {ours!r}" for key, (ours, _) in unequal.items())
                    + f", as rank {first.slot} on host {first.host} has",
                )
            )
    plain = [rank for rank in ranks if rank.machine.signature.get("extension") == "plain"]
    if plain:
        found.append(
            finding(
                "kernels-plain",
                slots=slots_of(plain),
                hosts=hosts_of(plain),
                found="plain-torch kernels are in use, which are slower",
                expected="the C++ kernels (epruntime._C)",
            )
        )
    return found


def check_checkpoint(ranks: Sequence[RankFacts], setting: Setting) -> list[Finding]:
    """Every rank finds the checkpoint, and all find the same one: configuration, names and sizes of files."""
    found = []
    for host, members in _groups([r for r in ranks if not r.machine.checkpoint], lambda rank: rank.host).items():
        found.append(
            finding(
                "checkpoint-missing",
                slots=slots_of(members),
                hosts=(host,),
                found=members[0].machine.checkpoint_error,
                expected=f"a checkpoint at {setting.model}",
            )
        )
    groups = _groups([r for r in ranks if r.machine.checkpoint], lambda rank: rank.machine.checkpoint)
    if len(groups) > 1:
        usual = max(groups.values(), key=len)
        most = usual[0].machine
        for digest, members in groups.items():
            if members is not usual:
                found.append(
                    finding(
                        "checkpoint-differs",
                        slots=slots_of(members),
                        hosts=hosts_of(members),
                        found=f"{setting.model}: digest {digest[:12]}, {members[0].machine.checkpoint_files} files",
                        expected=f"digest {most.checkpoint[:12]}, {most.checkpoint_files} files, as rank "
                        f"{usual[0].slot} on host {usual[0].host} has",
                    )
                )
    return found


def _unequal(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    keys = sorted(ours.keys() | theirs.keys())
    return {k: (ours.get(k, "none"), theirs.get(k, "none")) for k in keys if ours.get(k) != theirs.get(k)}


def _groups(ranks: Sequence[RankFacts], key: Callable[[RankFacts], str]) -> dict[str, list[RankFacts]]:
    found: defaultdict[str, list[RankFacts]] = defaultdict(list)
    for rank in ranks:
        found[key(rank)].append(rank)
    return dict(found)
