"""Generation: one membership of ranks, as seen from one of them; and the model that it serves.

configure -> Generation: transport -> load: MoE runtime, model, KV cache -> ServedModel: runner -> steps
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from epruntime.comm.interfaces import HostAddress, rank_address
from epruntime.comm.progress import Collective, Stamps
from epruntime.comm.select import make_transport
from epruntime.comm.transport import GroupInfo, Transport
from epruntime.errors import ProtocolError
from epruntime.models.loaded import LoadedModel
from epruntime.models.loader import inspect_model, load_model
from epruntime.moe.placement import placement_for
from epruntime.moe.runtime import MoERuntime
from epruntime.moe.stats import MoEStats
from epruntime.moe.types import StepContext
from epruntime.ops import batch_invariant
from epruntime.worker.batch_dependent import make_batch_dependent
from epruntime.worker.input_batch import InputBatch
from epruntime.worker.kv_budget import num_kv_blocks, resolve_max_model_len
from epruntime.worker.layer_trace import LayerTrace
from epruntime.worker.letters import Configure, Load
from epruntime.worker.memory import free_memory_bytes
from epruntime.worker.rehearsal import rehearse
from epruntime.worker.runner import ModelRunner

logger = logging.getLogger("epruntime.worker.generation")

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model ready to step on this rank.

    Attributes:
        model: weights, KV cache and description; runner: executes plans on it; moe: what its MoE layers share.
        num_kv_blocks, block_size: geometry of the KV cache; max_model_len: tokens.
        layer_trace: where the `load` message asks for one.
        unsteady_ops: under invariance=strict, ops of the model's that are not known to give a row the same bits in any
            batch.
    """

    model: LoadedModel
    runner: ModelRunner
    moe: MoERuntime
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    layer_trace: LayerTrace | None = None
    unsteady_ops: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Body of the `loaded` reply."""
        return {
            "num_kv_blocks": self.num_kv_blocks,
            "max_model_len": self.max_model_len,
            "info": self.model.info.to_dict(),
            "load_report": asdict(self.model.load_report),
            "experts_backend": self.moe.experts_backend,
            "placements": self.moe.placement_fingerprints,
        }

    def stats(self) -> dict[str, Any]:
        """Part of the `stats` reply that concerns the model."""
        return {
            "moe": self.moe.stats.snapshot(),
            "kv": {
                "num_blocks": self.num_kv_blocks,
                "block_size": self.block_size,
                "bytes": self.num_kv_blocks * self.model.kv_bytes_per_block(self.block_size),
            },
            "num_requests": self.runner.num_requests,
            "unsteady_ops": list(self.unsteady_ops),
        }

    def counters(self) -> dict[str, Any]:
        """Body of the `counters` reply."""
        return {"moe": self.moe.stats.packed(), "num_requests": self.runner.num_requests}

    def take_trace(self) -> dict[str, Any]:
        """Body of the `trace` reply: the rows since the last one.

        Raises:
            ProtocolError: the model was loaded without trace_layers.
        """
        if self.layer_trace is None:
            raise ProtocolError("nothing is traced: the model was loaded without trace_layers")
        return self.layer_trace.take()

    def close(self) -> None:
        """Lets go of weights, KV cache and row-independent ops."""
        batch_invariant.uninstall()
        self.model.close()
        self.moe.store.clear()


class Generation:
    """This rank's place in one membership, and its way to the other ranks.

    Args:
        config: the `configure` message. device: torch device type of the rows. stamps: where this rank says what it
            does.

    Attributes:
        address: at which the other ranks reach this one; None without others.

    Raises:
        ConfigError: the transport, or no address of this host, can serve this group.
        EngineDeadError: the ranks did not meet in time.
    """

    def __init__(self, config: Configure, *, stamps: Stamps, device: str = "cpu") -> None:
        self.config = config
        self.context = StepContext(stamps=stamps)
        stamps.join(config.generation)
        stamps.wait(Collective.RENDEZVOUS)
        several = config.world_size > 1
        self.address: HostAddress | None = rank_address(config.store_host, config.store_port) if several else None
        self.transport: Transport = make_transport(
            config.transport,
            GroupInfo(
                rank=config.ep_rank,
                world_size=config.world_size,
                generation=config.generation,
                store_host=config.store_host,
                store_port=config.store_port,
                hosts=config.hosts,
                slots=config.slots,
                device=device,
                timeout_s=config.step_timeout_s,
                interface_address="" if self.address is None else self.address.address,
            ),
        )
        stamps.go_on()

    @property
    def transport_name(self) -> str:
        return self.transport.name

    def load(self, letter: Load, progress: ProgressCallback) -> ServedModel:
        """Loads this rank's part of a model and takes its KV cache; row-independent ops are in place if it is strict.

        Raises:
            UnsupportedModelError, CheckpointError: the model is refused or damaged.
            ConfigError: lengths, budgets or a backend that cannot work.
        """
        batch_invariant.uninstall()
        if self.config.strict:
            batch_invariant.install()
        try:
            return self._load(letter, progress)
        except BaseException:
            batch_invariant.uninstall()
            raise

    def _load(self, letter: Load, progress: ProgressCallback) -> ServedModel:
        stamps = self.context.stamps
        stamps.note("headers")
        # Reads headers only: what is refused is refused before any weight is read.
        info = inspect_model(letter.model, dtype=letter.dtype)
        max_model_len = resolve_max_model_len(letter.max_model_len, model_limit=info.max_position_embeddings)
        config = self.config
        moe = MoERuntime(
            transport=self.transport,
            placement_for=lambda experts: placement_for(
                experts, config.world_size, letter.expert_placement, letter.num_redundant_experts
            ),
            backend=config.experts_backend,
            strict=config.strict,
            budget_rows=config.exchange_budget_tokens,
            context=self.context,
            stats=MoEStats(),
        )
        model = load_model(letter.model, dtype=letter.dtype, moe=moe, progress=progress, reading=stamps.note)
        stamps.note("KV cache")
        blocks = num_kv_blocks(
            num_blocks=letter.num_kv_blocks,
            memory_bytes=letter.kv_cache_memory_bytes,
            block_size=letter.block_size,
            bytes_per_block=model.kv_bytes_per_block(letter.block_size),
            max_model_len=max_model_len,
            whole_length=letter.max_model_len is not None,
            max_num_seqs=letter.max_num_seqs,
            ranks_on_host=letter.ranks_on_host,
            free_bytes=free_memory_bytes(),
        )
        model.allocate_kv(blocks, letter.block_size)
        inputs = InputBatch(
            block_size=letter.block_size,
            num_kv_blocks=blocks,
            max_num_batched_tokens=letter.max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=model.info.vocab_size,
            rope=model.info.rope,
        )
        stamps.note("rehearsal")
        unsteady_ops = self._rehearse(model, moe, letter.block_size) if config.strict else ()
        if letter.batch_dependent:
            layer = make_batch_dependent(model.module, self.context)
            logger.info("negative control: layer %d depends on the batch on purpose", layer)
        trace = LayerTrace(model.module) if letter.trace_layers else None
        on_batch = None if trace is None else trace.on_batch
        runner = ModelRunner(model, context=self.context, inputs=inputs, on_batch=on_batch)
        return ServedModel(
            model=model,
            runner=runner,
            moe=moe,
            num_kv_blocks=blocks,
            block_size=letter.block_size,
            max_model_len=max_model_len,
            layer_trace=trace,
            unsteady_ops=unsteady_ops,
        )

    def _rehearse(self, model: LoadedModel, moe: MoERuntime, block_size: int) -> tuple[str, ...]:
        """Completes the row-independent ops with what this model needs, and names the ops that are not among them."""
        census = rehearse(model, moe, block_size=block_size)
        if census.multiplies_complex:
            batch_invariant.install(complex_products=True)
        unsteady = tuple(sorted(census.unsteady))
        if unsteady:
            logger.warning(
                "%s uses ops that are not known to give a row the same bits in any batch, and invariance=strict may "
                "not hold for it: %s",
                model.info.model_type,
                ", ".join(unsteady),
            )
        return unsteady

    def close(self) -> None:
        """Ends the exchange; ranks that still wait for this one get an error."""
        self.transport.close()
