"""The scheduler against the rank's own bookkeeping: InputBatch must read every plan as FakeRank does."""

import random

import pytest

from epruntime.plan import StepPlan
from epruntime.testing.fake_rank import FakeRank
from epruntime.testing.scheduler_sim import VOCAB_SIZE, SchedulerSim, make_spec
from epruntime.worker.input_batch import InputBatch


class RankWithInputBatch(FakeRank):
    """Lets an InputBatch execute each plan too, with FakeRank's tokens, and compares what was computed."""

    inputs: InputBatch
    num_compared = 0

    def step(self, plan: StepPlan) -> None:
        super().step(plan)
        result = self._pending[-1].result
        sampled = dict(zip(result.rids.tolist(), zip(result.tokens, result.finish, strict=True), strict=True))
        refused = self.inputs.apply(plan)
        batch = self.inputs.build(plan)
        assert sorted([r.rid for r in batch.sampling] + list(refused)) == sorted(sampled)
        assert batch.num_prefill_tokens == result.num_prefill_tokens
        assert batch.num_decode_tokens == result.num_decode_tokens
        for request in batch.sampling:
            token, finish = sampled[request.rid]
            assert request.accept(int(token)) == finish
            if finish:
                self.inputs.end(request, plan.step)
        self.num_compared += len(sampled)


@pytest.mark.parametrize("depth", [1, 2])
def test_input_batch_reads_every_plan_as_the_scheduler_means_it(depth):
    num_compared = num_preemptions = 0
    for seed in range(25):
        rng = random.Random(seed)
        seqs = rng.randint(1, 5)
        sizes = {"block_size": rng.randint(1, 4), "max_num_batched_tokens": seqs + rng.randint(0, 8)}
        num_blocks = rng.randint(3, 12)
        sim = SchedulerSim(depth=depth, num_kv_blocks=num_blocks, max_num_seqs=seqs, **sizes)
        rank = RankWithInputBatch(num_blocks=num_blocks, max_num_seqs=seqs, vocab_size=VOCAB_SIZE, **sizes)
        rank.inputs = InputBatch(num_kv_blocks=num_blocks, max_model_len=1000, vocab_size=VOCAB_SIZE, **sizes)
        sim.ranks[0] = rank
        room = sim.schedulers[0].max_request_tokens
        for _ in range(60):
            event = rng.random()
            if event < 0.25:
                length = rng.randint(1, room - 1)
                vocab = VOCAB_SIZE + (rng.random() < 0.1)  # now and then a token that the rank refuses
                prompt = [rng.randrange(vocab) for _ in range(length)]
                sim.add(prompt, make_spec(max_tokens=rng.randint(1, room - length), stop_ids=(rng.randrange(11),)))
            elif event < 0.3 and sim.live:
                sim.drop(rng.choice(sim.live))
            elif event < 0.65 and sim.num_in_flight < depth:
                sim.send()
            elif sim.num_in_flight:
                sim.collect()
        sim.finish()
        assert len(rank.inputs) == 0
        num_compared += rank.num_compared
        num_preemptions += sim.schedulers[0].counters.preemptions
    assert num_compared > 500
    assert num_preemptions > 10
