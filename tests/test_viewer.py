"""The page of rollouts as a file: what goes into it, in which form, and what is refused. `test_viewer_browser.py` opens it."""

import base64
import gzip
import hashlib
import json
import random
import re
from html.parser import HTMLParser

import pytest

from mempo_trl import cli
from mempo_trl.data.village import Village
from mempo_trl.retrieval.bm25 import BM25Retriever
from mempo_trl.retrieval.document import Document
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.viewer import page as report
from mempo_trl.viewer.page import find_rollouts, write_report


HOSTILE = (
    "</script><script>window.pwned = 1</script><!-- <img src=x onerror='window.pwned = 2'> ]]> \u2028 \u2029 &lt; \x00"
)


def turn(completion="<think>a</think>", outcome="tool_call", **more) -> dict:
    """A turn as `rollout_record` writes it."""
    return {"completion": completion, "outcome": outcome, "well_formed": True, "response": None, **more}


def record(question="What is the pet of Anna?", answer="cat", golden_answers=None, turns=None, **more) -> dict:
    """A rollout as `rollout_record` writes it."""
    golden_answers = [["cat"]] if golden_answers is None else golden_answers
    turns = [turn(), turn(f"<mem>m</mem><answer>{answer}</answer>", "answer")] if turns is None else turns
    own = {"question": question, "golden_answers": golden_answers, "outcome": "answer", "answer": answer}
    return {**own, "turns": turns, **more}


def write_lines(path, records) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records), encoding="utf-8")


class Scripts(HTMLParser):
    """The scripts and styles that an HTML parser finds, and the elements there are."""

    def __init__(self, path):
        super().__init__()
        self.found, self.elements, self.policy = {}, [], None
        self._open = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        self._open = attributes.get("id", tag) if tag in ("script", "style") else None
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open is not None:
            self.found[self._open] = self.found.get(self._open, "") + data


def unpack(text: str) -> str:
    return gzip.decompress(base64.b64decode(text)).decode()


def read_page(path) -> tuple[dict, list[dict], list[dict]]:
    """What the page holds: about, index, and the bodies in the order of the index."""
    found = Scripts(path).found
    index = json.loads(unpack(found["index"]))
    lines = {name: unpack(text).split("\n") for name, text in found.items() if name.startswith("chunk-")}
    bodies = [json.loads(lines[f"chunk-{entry['chunk']}"][entry["position"]]) for entry in index]
    return json.loads(unpack(found["about"])), index, bodies


@pytest.fixture
def page(tmp_path):
    """Write records as a file and then as a page, and read it: `(about, index, bodies)`."""

    def make(*records, **kwargs):
        write_lines(tmp_path / "some.jsonl", records)
        return read_page(write_report(tmp_path / "some.jsonl", **kwargs).path)

    return make


def test_places_of_rollouts(tmp_path):
    """A training folder, an evaluation folder, a folder of files and a file are told apart, and files are in order."""
    names = ["rollouts/train-000002-rank0.jsonl", "rollouts/train-000001-rank1.jsonl"]
    for name in names:
        write_lines(tmp_path / "run" / name, [record()])
    write_lines(tmp_path / "evaluation" / "rollouts.jsonl", [record()])
    (tmp_path / "evaluation" / "evaluation.json").write_text('{"model": "m", "results": {}}', encoding="utf-8")
    assert find_rollouts(tmp_path / "run") == ([tmp_path / "run" / name for name in sorted(names)], {})
    assert find_rollouts(tmp_path / "run" / "rollouts")[0] == find_rollouts(tmp_path / "run")[0]
    evaluated = ([tmp_path / "evaluation" / "rollouts.jsonl"], {"model": "m", "results": {}})
    assert find_rollouts(tmp_path / "evaluation") == evaluated
    assert find_rollouts(tmp_path / "evaluation" / "rollouts.jsonl") == evaluated
    one = tmp_path / "run" / names[0]
    assert find_rollouts(one) == ([one], {})


def test_what_holds_no_rollouts_is_refused(tmp_path):
    """A path that is not there, a folder without rollouts or with two kinds, and a broken evaluation are named."""
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give a training or evaluation folder"):
        find_rollouts(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no rollouts; expected `rollouts"):
        find_rollouts(tmp_path)
    write_lines(tmp_path / "rollouts.jsonl", [record()])
    (tmp_path / "evaluation.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="evaluation.json is no JSON"):
        find_rollouts(tmp_path)
    (tmp_path / "evaluation.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="evaluation.json is no JSON object"):
        find_rollouts(tmp_path)
    write_lines(tmp_path / "rollouts" / "train-000000-rank0.jsonl", [record()])
    with pytest.raises(ValueError, match="of a training .* and of an evaluation"):
        find_rollouts(tmp_path)


@pytest.mark.parametrize("line", ['{"question": "q", "answers": ["a"]}', "[1]", "3", '{"turns": 3}'])
def test_lines_that_are_no_rollouts_are_refused(tmp_path, line):
    """A file of something else is named with its line, and neither the page nor a part of it is left behind."""
    (tmp_path / "dev.jsonl").write_text(json.dumps(record()) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"dev.jsonl:2 holds no rollout: it has no list of `turns`"):
        write_report(tmp_path / "dev.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["dev.jsonl"]


def test_arguments_that_make_no_sense(tmp_path):
    """No rollouts at all, and a folder as the page, are refused."""
    write_lines(tmp_path / "some.jsonl", [record()])
    with pytest.raises(ValueError, match="max_rollouts=0"):
        write_report(tmp_path / "some.jsonl", max_rollouts=0)
    with pytest.raises(ValueError, match="is a folder; name a file"):
        write_report(tmp_path / "some.jsonl", tmp_path)


def test_nothing_is_loaded_and_nothing_else_runs(tmp_path):
    """
    The page names no address, and its policy lets run exactly the program that is in it. What is not the program is
    base64, whatever the texts hold.
    """
    hostile = record(HOSTILE, HOSTILE, [[HOSTILE]], [turn(HOSTILE, response=HOSTILE)], id=HOSTILE, dataset=HOSTILE)
    write_lines(tmp_path / "rollouts.jsonl", [hostile])
    evaluation = {"model": HOSTILE, HOSTILE: HOSTILE}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    path = write_report(tmp_path).path
    assert path == tmp_path / "view.html"
    html = path.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\s\"']+", html) == ["http://www.w3.org/2000/svg"]
    assert "pwned" not in html and "\u2028" not in html
    scripts = Scripts(path)
    assert [dict(attributes).get("id") for tag, attributes in scripts.elements if tag == "script"] == [
        *("about", "index"),
        *(None, "chunk-0"),
    ]
    assert not [a for _, attributes in scripts.elements for a in attributes if a == "src" or a.startswith("on")]
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(scripts.found[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in scripts.policy
    assert scripts.policy.startswith("default-src 'none'; ") and "unsafe" not in scripts.policy
    about, index, bodies = read_page(path)
    assert about["evaluation"] == evaluation
    assert index[0]["question"] == bodies[0]["question"] == bodies[0]["turns"][0]["response"] == HOSTILE


def test_index_and_bodies(page):
    """The index has what the list needs, the body all that is shown; what is known to be missing is missing."""
    played = record(
        answer="cat; Oslo",
        golden_answers=[["cat", "a cat"], ["Rome"]],
        turns=[
            turn(R_M=None, prompt_ids=[1], completion_ids=[2], logps=[-0.1], mem_rewards_idx_list=[0, 0]),
            turn(R_M=0.123456, P_mem=0.5, memory="m", mem_rewards_idx_list=[0, 1, 0, 2, 0], prompt="p"),
            turn("<answer>cat; Oslo</answer>", "answer", R_M=-0.25, memory="m", mem_rewards_idx_list=[1]),
        ],
        **{"id": "q1", "dataset": "d", "step": 4, "mode": "train", "sample": 0, "reward": 0.5, "tokens_total": 90},
        error=None,
    )
    about, (entry,), (body,) = page(played)
    assert entry == {
        **{"id": "q1", "dataset": "d", "step": 4, "mode": "train", "sample": 0, "reward": 0.5, "tokens_total": 90},
        **{"outcome": "answer", "scores": [1.0, 0.0], "question": "What is the pet of Anna?", "answer": "cat; Oslo"},
        **{"golden": ["cat", "a cat", "Rome"], "objectives": 2, "turns": 3, "R_M": [None, 0.1235, -0.25]},
        **{"chunk": 0, "position": 0},
    }
    assert [part.get("memory_tokens") for part in body["turns"]] == [None, [1, 4], [0, 1]]
    assert body["turns"][1]["prompt"] == "p"
    assert not {"prompt_ids", "completion_ids", "logps", "mem_rewards_idx_list"} & set(body["turns"][0])
    assert "error" not in body
    assert (about["num_rollouts"], about["num_found"], about["num_broken"], about["files"]) == (1, 1, 0, 1)


def test_scripted_rollouts_of_the_village(page):
    """What `mempo collect` and the village write has texts only: memory, think, call and answer are read from them."""
    village = Village.generate(seed=0)
    documents = [Document(row["id"], row["title"], row["text"]) for row in village.corpus()]
    search = SearchTool(BM25Retriever.from_corpus(documents), top_k=1)
    row = village.questions("train", num_rows=1, num_objectives=[2], two_hop_frac=0.0)[0]
    expert = village.expert_rollout(row, random.Random(0), search)
    _, (entry,), (body,) = page(expert)
    first, second, last = body["turns"]
    assert "memory" not in first and first["call"]["name"] == "search" and first["think"]
    assert second["memory"] == re.search("<mem>(.*)</mem>", second["completion"])[1]
    assert last["think"] == "done" and "call" not in last
    assert entry["scores"] == [1.0, 1.0] and "R_M" not in entry


def test_rollouts_with_almost_nothing(page):
    """A rollout that failed, one without golden answers and an answer that is null are listed like all others."""
    failed = record(answer=None, turns=[], outcome="failed", error="time-out")
    bare = {"turns": [{}]}
    _, index, bodies = page(failed, bare)
    assert index[0]["outcome"] == "failed" and index[0]["scores"] == [0.0] and index[0]["turns"] == 0
    assert bodies[0]["error"] == "time-out"
    assert index[1] == {"golden": [], "objectives": 0, "turns": 1, "chunk": 0, "position": 1}


def test_numbers_and_letters_that_a_browser_refuses(page, tmp_path):
    """`NaN` becomes null, half of a surrogate pair a question mark."""
    (tmp_path / "odd.jsonl").write_text('{"turns": [{"R_M": NaN}], "question": "a\\ud800"}\n', encoding="utf-8")
    _, (entry,), (body,) = read_page(write_report(tmp_path / "odd.jsonl").path)
    assert "R_M" not in entry and body["turns"] == [{}] and body["question"] == "a?"


def test_the_normaliser_is_that_of_the_evaluation(tmp_path):
    """Right and wrong in the page agree with the figures above them."""
    write_lines(tmp_path / "rollouts.jsonl", [record(answer="the cat")])
    for normalizer, score in (("squad", 1.0), ("words", 0.0), ("unknown", 1.0)):
        (tmp_path / "evaluation.json").write_text(json.dumps({"settings": {"normalizer": normalizer}}))
        _, (entry,), _ = read_page(write_report(tmp_path).path)
        assert entry["scores"] == [score]


def test_chunks(page, monkeypatch):
    """Bodies are packed together up to a size, and each is found again; one that is larger has a chunk of its own."""
    monkeypatch.setattr(report, "CHUNK_BYTES", 1000)
    records = [record(f"question {i}", turns=[turn("x" * (3000 if i == 5 else 200))]) for i in range(12)]
    _, index, bodies = page(*records)
    assert [body["question"] for body in bodies] == [f"question {i}" for i in range(12)]
    chunks = [entry["chunk"] for entry in index]
    assert chunks == sorted(chunks) and 4 <= max(chunks) + 1 <= 8
    assert chunks.count(chunks[5]) == 1


def test_more_rollouts_than_wanted(page):
    """Of many rollouts so many as wanted are taken, evenly spread, and the page knows how many there were."""
    records = [record(f"question {i}") for i in range(10)]
    about, index, _ = page(*records, max_rollouts=4)
    assert [entry["question"] for entry in index] == [f"question {i}" for i in (0, 2, 5, 7)]
    assert (about["num_rollouts"], about["num_found"]) == (4, 10)
    for most in (9, 10, 11):
        assert len(page(*records, max_rollouts=most)[1]) == min(most, 10)


def test_lines_that_are_cut(tmp_path, caplog):
    """Half a line, as a killed run leaves it, is left out and counted; a file of nothing else is refused."""
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps(record()) + "\n\n" + json.dumps(record())[:40], encoding="utf-8")
    written = write_report(path)
    assert (written.num_rollouts, written.num_found, written.num_broken) == (1, 2, 1)
    assert "some.jsonl:3 is no JSON" in caplog.text
    assert read_page(written.path)[0]["num_broken"] == 1
    path.write_text('{"turns": [', encoding="utf-8")
    with pytest.raises(ValueError, match="holds no rollout: 1 of its 1 lines are no JSON"):
        write_report(path)


def test_rollouts_that_were_played_again(page):
    """In an evaluation the newest of a question and sample counts; in training a question may be played twice."""
    failed = record(answer=None, turns=[], outcome="failed", id="q", sample=0)
    again, other = record(id="q", sample=0), record(id="q", sample=1)
    about, index, bodies = page(failed, other, again)
    assert [(entry["outcome"], entry["sample"]) for entry in index] == [("answer", 0), ("answer", 1)]
    assert about["num_replaced"] == 1 and bodies[0]["turns"]
    assert len(page(*[{**row, "step": 1} for row in (failed, other, again)])[1]) == 3


def test_command(tmp_path, capsys):
    """`mempo view PATH` writes the page, says where it is and what is not in it."""
    write_lines(tmp_path / "some.jsonl", [record(f"q{i}") for i in range(3)])
    output = tmp_path / "new" / "page.html"
    given = ["view", str(tmp_path / "some.jsonl"), "--output_file", str(output), "--max_rollouts", "2"]
    assert cli.main(given) == 0
    said = capsys.readouterr().out
    assert f"2 of 3 rollouts in {output} (" in said
    assert len(read_page(output)[1]) == 2
    assert cli.main(given[:2]) == 0
    assert f"3 rollouts in {tmp_path / 'some.html'}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["view"])
    assert "PATH" in capsys.readouterr().err
