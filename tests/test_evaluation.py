"""Evaluation: figures by hand, batched generation against one prompt at a time, and an agent that knows nothing."""

import asyncio
import json

import pytest
import torch
from conftest import EOS, call, generation, search, tiny_model

from mempo_trl.evaluation import (
    TransformersEngine,
    model_eos_token_ids,
    run_agent,
    summarize,
    summarize_by_objectives,
    write_evaluation,
)
from mempo_trl.generation import BatchGenerator, Generator
from mempo_trl.protocol import Protocol
from mempo_trl.rollout import Rollout, Turn
from mempo_trl.tools import Toolbox


def turn(prompt: int, completion: int, outcome: str = "tool_call", **kwargs) -> Turn:
    """A turn of so many tokens."""
    kwargs = {"well_formed": True, "response": "found" if outcome == "tool_call" else None, **kwargs}
    return Turn([0] * prompt, [1] * completion, None, "text", outcome, carried=completion, **kwargs)


def rollout(answer: str | None, golden_answers, turns: list[Turn], outcome: str = "answer") -> Rollout:
    return Rollout("q", golden_answers, [0] * 10, turns, outcome, answer)


@pytest.fixture
def four_rollouts() -> list[Rollout]:
    """Three of one objective, one of two; two answers, one of them wrong in part."""
    return [
        # One search, then "The U.S." for "US": squad "us" = "us"; words "the u s" against "us".
        rollout("The U.S.", [["US"]], [turn(10, 5), turn(25, 7, "answer")]),
        # No search. "Anna Anna Smith" for "Anna Smith".
        rollout("Anna Anna Smith", [["Anna Smith"]], [turn(10, 4, "answer", well_formed=False)]),
        # Two searches, one of them in the last turn that was allowed, which is not made any more; one failed tool.
        rollout(None, [["cat"]], [turn(10, 5, tool_error="no network"), turn(30, 50, response=None)], "out_of_turns"),
        # A bad call, a search, and the answers to two objectives, the second wrong.
        rollout(
            "cat; Rome",
            [["cat", "a cat"], ["Paris"]],
            [turn(10, 5, "bad_call", well_formed=False, response="Error"), turn(20, 5), turn(20, 15, "answer")],
        ),
    ]


def test_figures_by_hand(four_rollouts):
    """Every figure of the summary under each normaliser, derived by hand."""
    # Exact match, squad: "us" = "us" 1; "anna anna smith" 0; no answer 0; two objectives 1 and 0, mean 0.5.
    #   (1 + 0 + 0 + 0.5) / 4 = 0.375. Words: "the u s" is not "us": 0.5 / 4 = 0.125.
    # F1, squad: 1; "anna anna smith" (3 tokens) against "anna smith" (2), 2 in common as a multiset: 4 / 5 = 0.8;
    #   0; 0.5. Sum 2.3. Words: {the, u, s} against {us} 0; as sets {anna, smith} both: 1; 0; 0.5. Sum 1.5.
    # Tokens, prompt and completion of every turn: 15 + 32 = 47; 14; 15 + 80 = 95; 15 + 25 + 35 = 75. Sum 231.
    # Peak, the longest turn: 32; 14; 80; 35. Sum 161.
    # Turns 2 + 1 + 2 + 3 = 8. Searches made: 1, 0, 1, 1. Well formed: 1, 0, 1, 0.
    figures = summarize(four_rollouts)
    expected = {
        "num_rollouts": 4,
        "normalizer": "squad",
        "exact_match": 1.5 / 4,
        "f1": 2.3 / 4,
        "exact_match_squad": 1.5 / 4,
        "exact_match_words": 0.5 / 4,
        "f1_squad": 2.3 / 4,
        "f1_words": 1.5 / 4,
        "format_ok_frac": 2 / 4,
        "tokens_total_mean": 231 / 4,
        "tokens_peak_mean": 161 / 4,
        "turns_mean": 8 / 4,
        "searches_mean": 3 / 4,
        "tool_errors": 1,
        "outcomes": {"answer": 3, "no_action": 0, "truncated": 0, "out_of_turns": 1, "out_of_context": 0},
    }
    assert figures == {
        name: value if isinstance(value, (str, dict)) else pytest.approx(value, abs=1e-12)
        for name, value in expected.items()
    }
    words = summarize(four_rollouts, "words")
    assert (words["normalizer"], words["exact_match"], words["f1"]) == ("words", 0.125, 0.375)
    same = ("exact_match_squad", "f1_words", "tokens_total_mean", "outcomes")
    assert [words[name] for name in same] == [figures[name] for name in same]


def test_figures_by_number_of_objectives(four_rollouts):
    """All rollouts first, then those of each number of objectives in rising order, each with its own means."""
    twelve = rollout(None, [["a"]] * 12, [turn(10, 1, "no_action")], "no_action")
    figures = summarize_by_objectives([twelve, *four_rollouts])
    assert list(figures) == ["all", "1", "2", "12"]
    assert [row["num_rollouts"] for row in figures.values()] == [5, 3, 1, 1]
    assert figures["1"] == summarize(four_rollouts[:3])
    assert (figures["2"]["exact_match"], figures["2"]["tokens_total_mean"]) == (0.5, 75)
    assert figures["all"]["exact_match"] == 1.5 / 5
    assert summarize_by_objectives(four_rollouts, "words")["1"]["normalizer"] == "words"
    assert list(summarize_by_objectives(four_rollouts[:3])) == ["all", "1"]


def test_files_of_an_evaluation(four_rollouts, tmp_path):
    """The report and one line per rollout are written as they are, in text that a person can read."""
    report = {"model": "里德", "results": summarize_by_objectives(four_rollouts)}
    four_rollouts[0].question = "里德学院?"
    write_evaluation(str(tmp_path / "new" / "folder"), report, four_rollouts)
    folder = tmp_path / "new" / "folder"
    assert json.loads((folder / "evaluation.json").read_text(encoding="utf-8")) == report
    lines = (folder / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    assert "里德学院?" in lines[0]
    records = [json.loads(line) for line in lines]
    assert [record["answer"] for record in records] == ["The U.S.", "Anna Anna Smith", None, "cat; Rome"]
    assert [record["tokens_total"] for record in records] == [47, 14, 95, 75]
    assert [record["tokens_peak"] for record in records] == [32, 14, 80, 35]


PROMPTS = ["a", "What is the pet of Anna?", "Search. " * 8, "\n"]


def prompt_ids(tokenizer) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


def test_batch_equals_one_prompt_at_a_time(tokenizer):
    """Greedy turns of a batch of prompts of different lengths are those of each prompt on its own, by arg max."""
    model = tiny_model(tokenizer).eval()
    prompts = prompt_ids(tokenizer)
    completions, logps = TransformersEngine(model, tokenizer, max_completion_length=12, temperature=0)(prompts)
    assert logps is None
    for ids, completion in zip(prompts, completions, strict=True):
        seen = list(ids)
        with torch.no_grad():
            while len(seen) < len(ids) + 12 and seen[-1] != tokenizer.eos_token_id:
                seen.append(model(torch.tensor([seen])).logits[0, -1].argmax().item())
        assert completion == seen[len(ids) :]


def test_the_model_s_sampling_defaults_do_not_count(tokenizer):
    """
    A model that ships sampling defaults, as Qwen2.5-Instruct ships a repetition penalty, is evaluated as it is trained:
    greedy and sampled turns are those of the bare distribution.
    """
    bare, shipped = tiny_model(tokenizer).eval(), tiny_model(tokenizer).eval()
    shipped.generation_config.update(do_sample=True, repetition_penalty=2.0, temperature=0.01, top_p=0.01, top_k=1)
    for temperature in (0, 1):
        outputs = []
        for model in (bare, shipped):
            torch.manual_seed(0)
            engine = TransformersEngine(model, tokenizer, max_completion_length=12, temperature=temperature)
            outputs.append(engine(prompt_ids(tokenizer))[0])
        assert outputs[0] == outputs[1]


def test_temperature(tokenizer):
    """Temperature 0 repeats itself, 1 samples the whole vocabulary by the model's distribution, and a seed fixes it."""
    model = tiny_model(tokenizer).eval()
    prompts = prompt_ids(tokenizer)[:1] * 400

    def sample(temperature: float, seed: int) -> list[int]:
        torch.manual_seed(seed)
        engine = TransformersEngine(model, tokenizer, max_completion_length=1, temperature=temperature)
        return [ids[0] for ids in engine(prompts)[0]]

    assert len(set(sample(0, seed=1))) == 1
    sampled = sample(1, seed=1)
    assert sampled == sample(1, seed=1) != sample(1, seed=2)
    # The distribution of an untrained model is almost flat over 267 tokens: 400 draws give 267 * (1 - exp(-400 / 267))
    # = 207 different ones on average, with a standard deviation of about 6. Cutting to the best 50 would give 50.
    assert abs(len(set(sampled)) - 207) < 25


def test_a_turn_ends_at_the_first_end_of_turn(tokenizer):
    """Sampled ids end with the first id that ends a turn, of the tokenizer or of the model, and hold no padding."""
    model = tiny_model(tokenizer).eval()
    plain = TransformersEngine(model, tokenizer, max_completion_length=8, temperature=0)(prompt_ids(tokenizer))[0]
    assert {len(ids) for ids in plain} == {8}  # nothing ends by itself
    end = plain[1][3]  # make an id that is sampled on the way end a turn
    model.generation_config.eos_token_id = [end, tokenizer.eos_token_id]
    engine = TransformersEngine(model, tokenizer, max_completion_length=8, temperature=0)
    assert engine.eos_token_ids == model_eos_token_ids(model, tokenizer) == sorted([end, tokenizer.eos_token_id])
    completions = engine(prompt_ids(tokenizer))[0]
    assert completions == [ids[: ids.index(end) + 1] if end in ids else ids for ids in plain]
    assert len(completions[1]) <= 4 and any(len(ids) == 8 for ids in completions)


def test_ids_that_end_a_turn(tokenizer):
    """The tokenizer's id ends a turn whatever the model declares, and is named once."""
    model = tiny_model(tokenizer)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    for declared, expected in ((None, [eos]), (eos, [eos]), ([eos], [eos]), ([7, eos, 3], [3, 7, eos]), (3, [3, eos])):
        model.generation_config.eos_token_id = declared
        assert model_eos_token_ids(model, tokenizer) == expected


def test_pad_token_of_a_tokenizer_without_one(tokenizer, smollm2_tokenizer):
    """Where the end of turn pads too, a turn still ends with it, once; so it is without a pad token."""
    model = tiny_model(smollm2_tokenizer).eval()
    assert smollm2_tokenizer.pad_token_id == smollm2_tokenizer.eos_token_id
    prompts = [smollm2_tokenizer(text)["input_ids"] for text in PROMPTS]
    engine = TransformersEngine(model, smollm2_tokenizer, max_completion_length=6, temperature=0)
    plain = engine(prompts)[0]
    assert {len(ids) for ids in plain} == {6}
    one_by_one = [engine([ids])[0][0] for ids in prompts]
    assert plain == one_by_one
    model.generation_config.eos_token_id = plain[2][1]
    engine = TransformersEngine(model, smollm2_tokenizer, max_completion_length=6, temperature=0)
    completion = engine(prompts)[0][2]
    assert completion == plain[2][: plain[2].index(plain[2][1]) + 1]


class ScriptedEngine(TransformersEngine):
    """An engine that answers each prompt with the question that it sees, after a search in odd questions."""

    def __init__(self, model, tokenizer, protocol):
        super().__init__(model, tokenizer, max_completion_length=300)
        self.tokenizer, self.protocol, self.batches = tokenizer, protocol, []

    def __call__(self, prompts, idle=False):
        self.batches.append(len(prompts))
        turns = []
        for ids in prompts:
            text = self.tokenizer.decode(ids)
            number = int(text.split("number ")[1].split("?")[0])
            searched = "Doc 1" in text
            turns.append(
                call(f"number {number}?")
                if number % 2 and not searched
                else f"{'<mem>seen</mem>' if searched else ''}<answer>{number}</answer>"
            )
        return [generation(self.tokenizer, turn).ids for turn in turns], None


def test_rollouts_come_in_the_order_of_the_questions(tokenizer):
    """
    One rollout per question, in their order, whatever batch a question is in and however many turns it takes; each
    batch is reported once, and a turn of a batch is one call of the engine.
    """
    protocol = Protocol(tokenizer, Toolbox([search]), system_prompt="Search.")
    engine = ScriptedEngine(tiny_model(tokenizer), tokenizer, protocol)
    questions = [{"question": f"Which is number {n}?", "golden_answers": [[str(n)]]} for n in range(7)]
    reported = []
    rollouts = run_agent(
        questions, protocol=protocol, engine=engine, max_turns=3, batch_size=3, on_batch=reported.append
    )
    assert [rollout.question for rollout in rollouts] == [row["question"] for row in questions]
    assert [rollout.answer for rollout in rollouts] == list("0123456")
    assert [len(rollout.turns) for rollout in rollouts] == [1, 2, 1, 2, 1, 2, 1]
    assert [len(batch) for batch in reported] == [3, 3, 1]
    assert [rollout for batch in reported for rollout in batch] == rollouts
    # 0 1 2: three first turns, then that of 1; 3 4 5: three, then 3 and 5; 6: one.
    assert engine.batches == [3, 1, 3, 2, 1]
    assert summarize(rollouts)["exact_match"] == 1.0


@pytest.mark.parametrize("limit", [{"max_turns": 1}, {"max_turns": 3, "max_prompt_length": 10}])
def test_limits_of_a_rollout(tokenizer, limit):
    """`max_turns` and `max_prompt_length` end rollouts that go on searching."""
    protocol = Protocol(tokenizer, Toolbox([search]), system_prompt="Search.")
    engine = ScriptedEngine(tiny_model(tokenizer), tokenizer, protocol)
    questions = [{"question": "Which is number 1?", "golden_answers": [["1"]]}]
    (played,) = run_agent(questions, protocol=protocol, engine=engine, batch_size=8, **limit)
    assert played.outcome == ("out_of_turns" if limit["max_turns"] == 1 else "out_of_context")
    assert played.answer is None and len(played.turns) == 1


@pytest.mark.parametrize("context", ["memory", "full"])
def test_an_untrained_agent_runs_through(tokenizer, context):
    """An agent that writes noise gives rollouts that are cut or do nothing, and figures for them."""
    protocol = Protocol(tokenizer, Toolbox([search]), context=context, system_prompt="Search.")
    engine = TransformersEngine(tiny_model(tokenizer).eval(), tokenizer, max_completion_length=10)
    questions = [{"question": f"Question {n}?", "golden_answers": [["cat"], ["dog"]]} for n in range(5)]
    torch.manual_seed(0)
    rollouts = run_agent(questions, protocol=protocol, engine=engine, max_turns=4, batch_size=2)
    figures = summarize(rollouts)
    assert figures["exact_match"] == figures["f1"] == figures["format_ok_frac"] == 0.0
    assert sum(figures["outcomes"].values()) == 5
    assert {rollout.outcome for rollout in rollouts} <= {"truncated", "no_action"}
    assert all(len(rollout.turns[0].completion_ids) <= 10 for rollout in rollouts)


def test_engine_is_what_the_batch_generator_expects(tokenizer):
    """The engine and its limits go into a `BatchGenerator` as they are; a full turn without an end was cut."""
    engine = TransformersEngine(tiny_model(tokenizer).eval(), tokenizer, max_completion_length=4, temperature=0)
    generator = BatchGenerator(engine, engine.max_completion_length, engine.eos_token_ids)
    assert isinstance(generator, Generator)

    async def one(ids):
        return await generator.generate(ids)

    made = asyncio.run(generator.run([one(ids) for ids in prompt_ids(tokenizer)]))
    assert [len(one.ids) for one in made] == [4] * 4
    assert {one.finish_reason for one in made} == {"length"}
    assert [one.logps for one in made] == [None] * 4
