import asyncio
import inspect
import threading

import pytest

from mempo_trl.generation import BatchGenerator, Generation, Generator, ReplayGenerator, run_in_event_loop
from mempo_trl.processes import ProcessFailure


EOS, OTHER_EOS = 2, 0


class Engine:
    """Gives each prompt its first id and an eos, and records the batches."""

    def __init__(self):
        self.batches = []

    def __call__(self, prompts, idle):
        self.batches.append((prompts, idle))
        return [[prompt[0], EOS] for prompt in prompts], None


def batch_generator(engine, **kwargs) -> BatchGenerator:
    return BatchGenerator(engine, max_completion_length=4, eos_token_ids=[EOS, OTHER_EOS], **kwargs)


async def rollout(generator, number: int, num_turns: int, between=None):
    """Takes turns and gives back its number, as often as the engine gave it."""
    given = []
    for turn in range(num_turns):
        generation = await generator.generate([number, turn])
        given.append(generation.ids[0])
        if between is not None:
            await between(number, turn)
    return given


def play_all(generator, rollouts):
    """Run to the end, and fail instead of hanging."""
    return asyncio.run(asyncio.wait_for(generator.run(rollouts), timeout=60))


def test_one_batch_per_turn():
    """All live rollouts take each turn in one batch; a finished rollout leaves, and results keep their order."""
    engine, seen = Engine(), []
    generator = batch_generator(engine, on_turn=lambda live, total: seen.append((live, total)))
    results = play_all(generator, [rollout(generator, 10, 1), rollout(generator, 11, 3), rollout(generator, 12, 2)])
    assert results == [[10], [11, 11, 11], [12, 12]]
    assert engine.batches == [
        ([[10, 0], [11, 0], [12, 0]], False),
        ([[11, 1], [12, 1]], False),
        ([[11, 2]], False),
    ]
    assert seen == [(3, 3), (2, 3), (1, 3)]


def test_order_does_not_depend_on_the_tools():
    """The requests of a batch come in the order of the rollouts, whichever tool was done first."""

    async def tool(number, turn):
        await asyncio.sleep(0.001 * (12 - number))  # the later the rollout, the sooner its tool is done

    engine = Engine()
    generator = batch_generator(engine)
    play_all(generator, [rollout(generator, number, 2, tool) for number in (10, 11, 12)])
    assert [prompts for prompts, _ in engine.batches] == [[[10, t], [11, t], [12, t]] for t in (0, 1)]


def test_tools_run_at_the_same_time():
    """Between two batches the rollouts' tools overlap: each of three waits for the others to have begun."""
    begun, engine = [], Engine()
    generator = batch_generator(engine)

    async def tool(number, turn):
        begun.append(number)
        while len(begun) < 3 * (turn + 1):
            await asyncio.sleep(0)

    play_all(generator, [rollout(generator, number, 2, tool) for number in range(3)])
    assert len(engine.batches) == 2


def test_one_generator_runs_many_batches():
    """A generator can be run again, in another event loop."""
    engine = Engine()
    generator = batch_generator(engine)
    for _ in range(2):
        assert play_all(generator, [rollout(generator, 10, 2)]) == [[10, 10]]
    assert len(engine.batches) == 4


def test_nothing_to_do():
    """No rollout anywhere: nothing is generated."""
    engine = Engine()
    generator = batch_generator(engine)
    assert play_all(generator, []) == []
    assert play_all(generator, [rollout(generator, 10, 0)]) == [[]]
    assert engine.batches == []


@pytest.mark.parametrize(
    ("ids", "finish_reason"),
    [
        ([], "stop"),
        ([7], "stop"),
        ([7, EOS], "stop"),
        ([7, 7, 7], "stop"),
        ([7, 7, 7, 7], "length"),
        ([7, 7, 7, EOS], "stop"),
        ([7, 7, 7, OTHER_EOS], "stop"),  # another id that ends a turn
        ([EOS, 7, 7, 7], "length"),
    ],
)
def test_finish_reason(ids, finish_reason):
    """Only a turn of full length that doesn't end in one of the eos ids was cut."""
    generator = batch_generator(lambda prompts, idle: ([ids], None))
    (generation,) = play_all(generator, [generator.generate([5])])
    assert generation == Generation(ids, None, finish_reason)


def test_logps():
    """Log-probabilities of the engine reach their rollout."""
    generator = batch_generator(
        lambda prompts, idle: ([[p[0], EOS] for p in prompts], [[-p[0], -0.5] for p in prompts])
    )
    results = play_all(generator, [generator.generate([3]), generator.generate([4])])
    assert [(result.ids, result.logps) for result in results] == [([3, EOS], [-3, -0.5]), ([4, EOS], [-4, -0.5])]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (([[7]], None), "1 completions for 2 prompts"),
        (([[7]] * 3, None), "3 completions for 2 prompts"),
        (([[7]] * 2, [[-1.0]]), "log-probabilities of 1 completions for 2 prompts"),
        (([[7, 7]] * 2, [[-1.0, -1.0], [-1.0]]), "1 log-probabilities for 2 tokens"),
        (([[7, 7]] * 2, [[-1.0, -1.0], None]), "0 log-probabilities for 2 tokens"),
        (([[7, 7]] * 2, [[-1.0, -1.0], [-1.0] * 3]), "3 log-probabilities for 2 tokens"),
    ],
)
def test_wrong_number_of_results(made, says):
    """An engine that returns too few or too many of anything is stopped at once."""
    generator = batch_generator(lambda prompts, idle: made)
    with pytest.raises(RuntimeError, match=says):
        play_all(generator, [rollout(generator, 10, 1), rollout(generator, 11, 1)])


def test_log_probabilities_of_some_turns_only():
    """An engine that reports log-probabilities in one turn and none in the next is stopped, not padded."""
    engine = iter([([[3], [4]], [[-1.0], [-2.0]]), ([[5], [6]], None)])
    generator = batch_generator(lambda prompts, idle: next(engine))
    with pytest.raises(RuntimeError, match="for some turns of a batch and none for others"):
        play_all(generator, [rollout(generator, number, 2) for number in (10, 11)])


@pytest.mark.parametrize("turn", [0, 1])
def test_exception_in_a_rollout(turn):
    """An exception inside one rollout rises as it is, nothing more is generated, and nothing hangs."""

    async def tool(number, turn_number):
        if (number, turn_number) == (11, turn):
            raise KeyError("broken")

    engine = Engine()
    generator = batch_generator(engine)
    with pytest.raises(KeyError, match="broken"):
        play_all(generator, [rollout(generator, number, 3, tool) for number in (10, 11, 12)])
    assert len(engine.batches) == turn + 1


def test_exception_before_the_first_turn():
    """A rollout that fails before it asks for anything stops the others, too."""

    async def broken():
        raise ValueError("no question")

    engine = Engine()
    generator = batch_generator(engine)
    with pytest.raises(ValueError, match="no question"):
        play_all(generator, [rollout(generator, 10, 1), broken()])
    assert engine.batches == []


def test_exception_in_the_engine():
    """An exception of the engine rises as it is, and the rollouts that wait for it are ended."""
    ended = []

    async def waiting(generator):
        try:
            await generator.generate([1])
        finally:
            ended.append(True)

    def engine(prompts, idle):
        raise MemoryError("too much")

    generator = batch_generator(engine)
    with pytest.raises(MemoryError, match="too much"):
        play_all(generator, [waiting(generator), waiting(generator)])
    assert ended == [True, True]


def faked_process(rounds):
    """A reduction with one other process, which brings these numbers of requests and this failure flag."""
    rounds = iter(rounds)
    return lambda values: [max(pair) for pair in zip(values, next(rounds), strict=True)]


@pytest.mark.parametrize(("equal_counts", "widths"), [(False, [1, 1]), (True, [3, 2])])
def test_idle_process(equal_counts, widths):
    """A process without requests keeps the others company with dummies: as many as they have, where that is needed."""
    engine = Engine()
    generator = batch_generator(
        engine, reduce_max=faked_process([[3, 0], [2, 0], [0, 0]]), dummy_prompt=[9], equal_counts=equal_counts
    )
    assert play_all(generator, []) == []
    assert engine.batches == [([[9]] * width, True) for width in widths]


@pytest.mark.parametrize(("equal_counts", "padded"), [(False, 0), (True, 2)])
def test_process_with_fewer_requests(equal_counts, padded):
    """A process with fewer requests fills up where the engine needs equal counts; its own results come first."""
    engine = Engine()
    generator = batch_generator(
        engine, reduce_max=faked_process([[3, 0], [1, 0], [0, 0]]), dummy_prompt=[9], equal_counts=equal_counts
    )
    assert play_all(generator, [rollout(generator, 10, 1)]) == [[10]]
    assert engine.batches == [([[10, 0]] + [[9]] * padded, False), ([[9]], True)]


def test_default_dummy_is_an_end_of_turn():
    """Without a dummy prompt an idle process sends one token."""
    engine = Engine()
    play_all(batch_generator(engine, reduce_max=faked_process([[1, 0], [0, 0]])), [])
    assert engine.batches == [([[EOS]], True)]


def test_failure_of_another_process():
    """A failure elsewhere ends this process with its cause."""
    engine = Engine()
    generator = batch_generator(
        engine, reduce_max=faked_process([[1, 0], [0, 1]]), gather=lambda value: [value, None, "KeyError: 'broken'"]
    )
    with pytest.raises(ProcessFailure, match="A rollout failed on process 2: KeyError: 'broken'"):
        play_all(generator, [rollout(generator, 10, 5)])
    assert len(engine.batches) == 1


class Processes:
    """Two threads that stand for processes, with a reduction that waits for both, as a collective does."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=30)
        self.values = [None, None]

    def gather(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered

    def run(self, make):
        """`make(rank, **collectives)` gives a generator and its rollouts; result or exception of both ranks."""
        results = [None, None]

        def work(rank):
            def gather(value):
                return self.gather(rank, value)

            def reduce_max(values):
                return [max(pair) for pair in zip(*gather(values), strict=True)]

            generator, rollouts = make(rank, reduce_max=reduce_max, gather=gather)
            try:
                results[rank] = play_all(generator, rollouts)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def test_processes_generate_equally_often():
    """With 1 and 4 turns on two processes, both call the engine four times, the idle one with a dummy."""
    engines = [Engine(), Engine()]

    def make(rank, **collectives):
        generator = batch_generator(engines[rank], **collectives, dummy_prompt=[9])
        return generator, [rollout(generator, 10 + rank, 1 if rank == 0 else 4)]

    assert Processes().run(make) == [[[10]], [[11] * 4]]
    assert [[idle for _, idle in engine.batches] for engine in engines] == [
        [False, True, True, True],
        [False, False, False, False],
    ]


def test_processes_fail_together():
    """A rollout that fails on one process rises there and ends the other one as well, which names it."""

    def make(rank, **collectives):
        async def tool(number, turn):
            if (rank, turn) == (1, 1):
                raise KeyError("broken")

        generator = batch_generator(Engine(), **collectives)
        return generator, [rollout(generator, 10, 5, tool)]

    other, failed = Processes().run(make)
    assert isinstance(failed, KeyError)
    assert isinstance(other, ProcessFailure)
    assert str(other) == "A rollout failed on process 1: KeyError: 'broken'"


def test_replay():
    """Written turns come in their order, whatever the prompt; one more is an error."""
    turns = [Generation([1]), Generation([2], [-0.5], "length")]

    async def three():
        generator = ReplayGenerator(turns)
        return [await generator.generate([7]) for _ in range(3)]

    async def two():
        generator = ReplayGenerator(turns)
        return [await generator.generate([7]) for _ in range(2)]

    assert asyncio.run(two()) == turns
    with pytest.raises(RuntimeError):
        asyncio.run(three())


def test_generator_is_abstract():
    """A generator has to say how it generates."""
    with pytest.raises(NotImplementedError):
        asyncio.run(Generator().generate([1]))


async def answer(value):
    await asyncio.sleep(0)
    if isinstance(value, Exception):
        raise value
    return value


def test_run_in_event_loop():
    """A coroutine is run to its end where no event loop runs; its exception rises."""
    assert run_in_event_loop(answer(7)) == 7
    with pytest.raises(KeyError, match="broken"):
        run_in_event_loop(answer(KeyError("broken")))

    async def thread():
        return threading.get_ident()

    assert run_in_event_loop(thread()) == threading.get_ident()  # in this thread, which owns the device


def test_run_in_event_loop_that_runs():
    """The same from within a running event loop, as in a notebook."""

    async def notebook(value):
        return run_in_event_loop(answer(value))

    assert asyncio.run(notebook(7)) == 7
    with pytest.raises(KeyError, match="broken"):
        asyncio.run(notebook(KeyError("broken")))


class Echo(Generator):
    """Gives the first id of each prompt, at once."""

    async def generate(self, prompt_ids, rollout=None):
        await asyncio.sleep(0)
        return Generation(prompt_ids[:1])


def test_run_without_a_barrier():
    """By default all rollouts are played at once, each at its own pace, and results keep their order."""
    now, order = 0, []

    async def all_there(number, turn):
        nonlocal now
        now += turn == 0
        while now < 3:
            await asyncio.sleep(0)
        order.append(number)

    generator = Echo()
    results = play_all(generator, [rollout(generator, n, 4 - n, all_there) for n in (1, 2, 3)])
    assert results == [[1, 1, 1], [2, 2], [3]]
    assert order.index(3) < len(order) - 1 - order[::-1].index(1)
    assert play_all(generator, []) == []


def test_run_stops_at_an_error():
    """The first error rises, rollouts that wait are cancelled, and those that have not begun never begin."""
    ended = []

    async def waiting():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waiting")

    async def broken():
        raise KeyError("broken")

    generator = Echo()
    generator.max_concurrency = 2
    last = rollout(generator, 1, 1)
    with pytest.raises(KeyError, match="broken"):
        play_all(generator, [waiting(), broken(), last])
    assert ended == ["waiting"]
    assert inspect.getcoroutinestate(last) == inspect.CORO_CLOSED


def test_checks_nothing_by_default():
    """A generator without a server has nothing to check and no usage to tell."""
    assert asyncio.run(Echo().check()) is None and Echo().usage() is None
