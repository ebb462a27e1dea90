"""Rollouts as they are on disk, written by hand."""


def turn(prompt: int, completion: int, outcome: str = "tool_call", **kwargs) -> dict:
    """A turn of so many tokens, with a response if it is a call."""
    defaults = {
        "completion": "text",
        "outcome": outcome,
        "well_formed": True,
        "memory": None,
        "response": "found" if outcome == "tool_call" else None,
        "tool_error": None,
        "tool_seconds": 0.0,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
    }
    return defaults | kwargs


def record(answer, golden_answers, turns=None, outcome: str = "answer", question: str = "q", **kwargs) -> dict:
    """A rollout of one turn of 10 + 5 tokens, or of the given ones."""
    turns = [turn(10, 5, "answer")] if turns is None else turns
    defaults = {
        "question": question,
        "golden_answers": golden_answers,
        "outcome": outcome,
        "answer": answer,
        "well_formed": all(turn["well_formed"] for turn in turns),
        "turns": turns,
    }
    return defaults | kwargs


def failed(golden_answers, question: str = "q", **kwargs) -> dict:
    """A rollout that could not be played, as `play_questions` writes it."""
    known = {"question": question, "golden_answers": golden_answers, "outcome": "failed", "turns": []}
    return known | {"error": "no server", **kwargs}
