"""The ledger of encodes under way."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_omni_sched.core.engine.ledger import AheadLedger, EncodeState, Orders


def test_equal_items_are_encoded_once():
    ledger = AheadLedger(100)
    assert ledger.want("r1", "a", 10) is EncodeState.QUEUED
    assert ledger.want("r2", "a", 10) is EncodeState.QUEUED
    assert ledger.take_orders() == Orders(submit=(("a", 1),))
    assert ledger.want("r3", "a", 10) is EncodeState.ENCODING
    assert not ledger.take_orders()
    ledger.ready("a", 1)
    assert ledger.state("a") is EncodeState.READY
    assert ledger.load("a")
    assert ledger.take_orders() == Orders(load=("a",))
    assert len(ledger) == 0


def test_the_bound_holds_and_the_queue_goes_on_when_there_is_room():
    ledger = AheadLedger(25)
    for mm_hash in "abc":
        ledger.want("r", mm_hash, 10)
    assert submitted(ledger) == ["a", "b"]
    assert submitted(ledger) == []
    ledger.ready("a", 1)
    assert submitted(ledger) == []
    ledger.load("a")
    assert ledger.take_orders() == Orders(submit=(("c", 3),), load=("a",))


def test_what_is_ready_and_not_used_never_keeps_the_lane_idle():
    """Its requests may be waiting for what is queued: an item they had in the cache once, and lost."""
    ledger = AheadLedger(20)
    for mm_hash in "abc":
        ledger.want("r", mm_hash, 10)
    assert submitted(ledger) == ["a", "b"]
    ledger.ready("a", 1)
    assert submitted(ledger) == []
    ledger.ready("b", 2)
    assert submitted(ledger) == ["c"]


def test_workers_have_few_at_a_time_so_that_what_is_wanted_now_can_overtake():
    ledger = AheadLedger(1000, max_encoding=2)
    for mm_hash in "abcd":
        ledger.want("r1", mm_hash, 10)
    assert submitted(ledger) == ["a", "b"]
    ledger.want("r2", "urgent", 10)
    for mm_hash in "cd":  # in this step, r2 stood before r1
        ledger.want("r1", mm_hash, 10)
    ledger.ready("a", 1)
    assert submitted(ledger) == ["urgent"]
    ledger.ready("b", 2)
    assert submitted(ledger) == ["c"]  # nobody was asked for in this step: the oldest
    ledger.failed("urgent", 3)
    ledger.release("r1")
    assert ledger.num_pending == 0


def test_one_larger_than_the_bound_goes_alone():
    ledger = AheadLedger(5)
    ledger.want("r", "large", 10)
    ledger.want("r", "small", 1)
    assert submitted(ledger) == ["large"]
    assert submitted(ledger) == []


def test_a_request_that_ends_gives_its_place_back():
    ledger = AheadLedger(20)
    for request_id, mm_hash in [("r1", "encoding"), ("r1", "ready"), ("r1", "queued"), ("r2", "queued")]:
        ledger.want(request_id, mm_hash, 10)
    assert submitted(ledger) == ["encoding", "ready"]
    ledger.ready("ready", 2)
    ledger.release("r1")
    assert ledger.take_orders() == Orders(submit=(("queued", 3),), forget=("encoding", "ready"))
    ledger.release("r2")
    assert ledger.take_orders() == Orders(forget=("queued",))
    assert (len(ledger), ledger.num_embeds) == (0, 0)


def test_what_another_wants_stays():
    ledger = AheadLedger(20)
    ledger.want("r1", "a", 10)
    ledger.want("r2", "a", 10)
    ledger.take_orders()
    ledger.release("r1")
    assert not ledger.take_orders()
    assert ledger.failed("a", 1) == {"r2"}


def test_a_failure_is_of_those_who_wanted_it():
    ledger = AheadLedger(20)
    ledger.want("r1", "bad", 10)
    ledger.want("r2", "bad", 10)
    ledger.want("r3", "good", 10)
    ledger.take_orders()
    assert ledger.failed("bad", 1) == {"r1", "r2"}
    assert ledger.failed("bad", 1) == ()
    assert ledger.failed("never heard of", 1) == ()
    assert ledger.state("good") is EncodeState.ENCODING
    # wanted again, it is tried again
    assert ledger.want("r4", "bad", 10) is EncodeState.QUEUED


def test_a_late_answer_is_not_taken_for_one_about_the_next_attempt():
    ledger = AheadLedger(20)
    ledger.want("r1", "a", 10)
    ledger.take_orders()
    ledger.release("r1")
    ledger.want("r2", "a", 10)
    assert ledger.take_orders() == Orders(submit=(("a", 2),), forget=("a",))
    ledger.ready("a", 1)
    assert ledger.failed("a", 1) == ()
    assert ledger.state("a") is EncodeState.ENCODING
    ledger.ready("a", 2)
    assert ledger.load("a")


def submitted(ledger):
    return [mm_hash for mm_hash, _ in ledger.take_orders().submit]


class LedgerMachine(RuleBasedStateMachine):
    """Any order of events, with a worker that keeps count of what it holds."""

    requests = st.sampled_from("rstu")
    contents = st.sampled_from(["a1", "b2", "c3", "d9"])  # the digit: embeddings

    def __init__(self) -> None:
        super().__init__()
        self.ledger = AheadLedger(6)
        self.at_worker: dict[str, int] = {}  # with its ticket

    @rule(request=requests, content=contents)
    def want(self, request, content):
        self.ledger.want(request, content, int(content[1]))

    @rule(request=requests)
    def release(self, request):
        self.ledger.release(request)

    @rule()
    def step(self):
        orders = self.ledger.take_orders()
        assert set(orders.forget) <= set(self.at_worker)
        assert set(orders.load) <= set(self.at_worker)
        assert not set(orders.forget) & set(orders.load)
        for content in (*orders.forget, *orders.load):
            del self.at_worker[content]
        assert not {content for content, _ in orders.submit} & set(self.at_worker)
        self.at_worker.update(orders.submit)
        held = sum(int(content[1]) for content in self.at_worker)
        states = [self.ledger.state(content) for content in self.at_worker]
        encoding = states.count(EncodeState.ENCODING)
        assert encoding <= 1 or held <= 6
        assert encoding <= self.ledger.max_encoding
        assert encoding or not self.ledger.num_pending, "what is queued waits for nothing"

    @rule(content=contents, ok=st.booleans())
    def answer(self, content, ok):
        if content not in self.at_worker or self.ledger.state(content) is not EncodeState.ENCODING:
            return
        if ok:
            self.ledger.ready(content, self.at_worker[content])
        else:
            assert self.ledger.failed(content, self.at_worker.pop(content))

    @rule(content=contents)
    def load(self, content):
        was_ready = self.ledger.state(content) is EncodeState.READY
        assert self.ledger.load(content) == was_ready

    @invariant()
    def laws(self):
        self.ledger.validate()


TestLedger = LedgerMachine.TestCase


def test_dropped_attempts_leave_what_is_queued_and_nothing_to_order() -> None:
    ledger = AheadLedger(100, max_encoding=2)
    for name in "abc":
        ledger.want("r", name, 10)
    assert [content for content, _ in ledger.take_orders().submit] == ["a", "b"]
    ledger.ready("a", 1)
    ledger.drop_attempts()
    ledger.validate()
    assert [ledger.state(name) for name in "abc"] == [None, None, EncodeState.QUEUED]
    assert ledger.num_embeds == 0
    assert not ledger.has_orders
    assert ledger.ready("b", 2) == set()  # an answer to a dropped attempt
    assert ledger.want("r", "a", 10) is EncodeState.QUEUED
    assert sorted(ticket for _, ticket in ledger.take_orders().submit) == [3, 4]
