"""Pools under any workload: never more than there is, and a guarantee that holds when what was lent is back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_omni_sched.resource.pipeline.modality_pools import DEFAULT_SHARES, Grant, Pools, RefusalReason

TOTAL = 1000
modalities = st.sampled_from(sorted(DEFAULT_SHARES))


class PoolsMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.pools = Pools(TOTAL)
        self.grants: list[Grant] = []

    @rule(modality=modalities, num_bytes=st.integers(0, TOTAL + 1))
    def reserve(self, modality: str, num_bytes: int) -> None:
        free = self.pools.free_bytes
        answer = self.pools.reserve(modality, num_bytes)
        if isinstance(answer, Grant):
            assert num_bytes <= free
            self.grants.append(answer)
        else:
            assert answer.missing_bytes > 0
            assert self.pools.free_bytes == free

    @rule(which=st.integers(0, 1000))
    def release(self, which: int) -> None:
        if self.grants:
            grant = self.grants.pop(which % len(self.grants))
            assert self.pools.release(grant)
            assert not self.pools.release(grant)

    @rule(modality=modalities)
    def take_all_of_the_guarantee(self, modality: str) -> None:
        pools = self.pools
        rest = pools.guaranteed_bytes(modality) - pools.used_bytes(modality)
        if rest < 0:
            return
        answer = pools.reserve(modality, rest)
        if not isinstance(answer, Grant):
            assert answer.reason is RefusalReason.LENT
            for grant in list(self.grants):
                if pools.used_bytes(grant.modality) > pools.guaranteed_bytes(grant.modality):
                    self.grants.remove(grant)
                    assert pools.release(grant)
            answer = pools.reserve(modality, rest)
        assert isinstance(answer, Grant)
        self.grants.append(answer)

    @rule()
    def adapt(self) -> None:
        self.pools.adapt()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "pools"):
            return
        by_modality = dict.fromkeys(DEFAULT_SHARES, 0)
        for grant in self.grants:
            by_modality[grant.modality] += grant.num_bytes
        assert by_modality == {name: self.pools.used_bytes(name) for name in by_modality}
        assert sum(by_modality.values()) + self.pools.free_bytes == TOTAL
        assert self.pools.free_bytes >= 0
        assert sum(self.pools.guaranteed_bytes(name) for name in by_modality) <= TOTAL
        assert all(share > 0 for share in self.pools.shares.values())


TestPools = PoolsMachine.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
