"""Preflight: what is wrong with hosts, settings and network, found before weights are read.

facts of each rank -> checks -> the real transport: payloads, latency, bandwidth -> checks -> Verdict

Pure: facts are gathered by `epruntime.worker.preflight`, and the order of things is `epruntime.engine.preflight`'s.
"""
