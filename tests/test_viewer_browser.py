"""The page of rollouts in a real browser. Needs Chromium: `CHROMIUM=/path/to/it`, or one on the `PATH`."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from test_viewer import HOSTILE, record, turn, write_lines

from mempo_trl.viewer import page as report
from mempo_trl.viewer.page import write_report


playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (`pip install playwright`)")
expect = playwright.expect
NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
LONG_TEXT = "All work and no play. " * 5000


@pytest.fixture(scope="module")
def browser():
    executable = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no Chromium: set CHROMIUM, or put one of {', '.join(NAMES)} on the PATH")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Open a page: `opened(path, hash)`. At the end nothing was requested but the page, and the console is empty."""
    contexts, pages, requests, messages = [], set(), set(), []

    def open_page(path: Path, place: str = "", viewport=DESKTOP, **kwargs):
        context = browser.new_context(viewport=viewport, **kwargs)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.add(request.url.split("#")[0]))
        page.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
        pages.add(path.as_uri())
        page.goto(path.as_uri() + place)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    assert [page.evaluate("window.pwned") for context in contexts for page in context.pages] == [None] * len(contexts)
    for context in contexts:
        context.close()
    assert requests == pages and messages == []


def search_turn(query, response, memory=None, **more) -> dict:
    block = "" if memory is None else f"<mem>{memory}</mem>\n"
    call = {"name": "search", "arguments": {"query": query}}
    completion = f"{block}<think>look for {query}</think>\n<tool_call>{json.dumps(call)}</tool_call>"
    own = {"memory": memory, "think": f"look for {query}", "call": call, "response": response}
    return turn(completion, **own, prompt_tokens=100, completion_tokens=20, **more)


def answer_turn(answer, memory, **more) -> dict:
    completion = f"<mem>{memory}</mem>\n<think>done</think>\n<answer>{answer}</answer>"
    own = {"memory": memory, "think": "done", "call": None}
    return turn(completion, "answer", **own, prompt_tokens=90, completion_tokens=30, **more)


CAT = "Doc 1(Title: Anna (village)) Anna has a black cat (old).\nDoc 2(Title: Bob) Bob has\nDoc 7(Title: x) a dog."
KEEPS = record(
    turns=[
        search_turn("Anna", CAT),
        search_turn("Bob", "Doc 1(Title: Bob) no pet", "Anna has a cat", R_M=0.3, P_mem=0.6, P_full=0.3, A_M=1.5),
        answer_turn("cat", "Anna has a black Cat!", R_M=-0.1, P_mem=0.5, P_full=0.6, A_M=-3.0),
    ],
    **{"id": "q0", "dataset": "village", "step": 1, "mode": "train", "reward": 1.0, "A_T": 0.5, "tokens_total": 360},
    memory_weight=0.5,
)
LOSES = record(
    "What is the pet of Anna?; Who is the boss of Bob?",
    "dog; Carl",
    [["cat"], ["Carl", "Karl"]],
    [
        search_turn("Anna", CAT),
        search_turn("Anna again", "No results found for this query.", "Anna has a cat", R_M=0.0),
        search_turn("Bob", "Doc 1(Title: Bob) The boss of Bob is KARL.", "something about Anna", R_M=-0.5),
        answer_turn("dog; Carl", "the boss is Carl", R_M=-0.4),
    ],
    **{"id": "q1", "dataset": "other", "step": 2, "mode": "train", "reward": 0.5, "A_T": -0.5, "tokens_total": 500},
)
CUT = record("Where is Oslo?", None, [["Norway"]], [turn("<mem>never", "truncated")], step=3, outcome="truncated")
SIBLING = {**KEEPS, "id": "q2", "answer": "dog", "reward": 0.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A page of four rollouts: one keeps its answer, one loses it, one is cut, and one is the first one's sibling."""
    folder = tmp_path_factory.mktemp("run")
    write_lines(folder / "rollouts" / "train-000001-rank0.jsonl", [KEEPS, LOSES, CUT, SIBLING])
    return write_report(folder).path


def rows(page) -> list[str]:
    return page.locator(".row .row-question").all_inner_texts()


def test_opens(run, opened):
    """The list, the figures of all rollouts and the ways into them are there."""
    page = opened(run)
    assert (
        len(rows(page)) == 4 and "4 rollouts" in page.inner_text("#status") and "EM 0.38" in page.inner_text("#status")
    )
    about = page.inner_text("#detail")
    assert "Training" in about and "Answers that are wrong" in about and "Ended as “truncated”" in about
    page.click("text=Ended as “truncated”")
    assert rows(page) == ["Where is Oslo?"]


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("verdict", "right", [0]),
        ("verdict", "partly", [1]),
        ("verdict", "wrong", [2, 3]),
        ("outcome", "truncated", [2]),
        ("dataset", "other", [1]),
        ("objectives", "2", [1]),
        ("turns_max", "3", [0, 2, 3]),
        ("turns_min", "4", [1]),
        ("R_M_max", "-0.45", [1]),
        ("R_M_min", "0.2", [0, 3]),
        ("step_min", "2", [1, 2]),
        ("q", "OSLO", [2]),
        ("q", "norway", [2]),
        ("sort", "R_M", [1, 0, 3, 2]),
        ("sort", "-R_M", [0, 3, 1, 2]),
        ("sort", "-turns", [1, 0, 3, 2]),
        ("sort", "-step", [2, 1, 0, 3]),
        ("lost", "1", [1]),
    ],
)
def test_filters(run, opened, name, value, expected):
    """Each filter and order gives its rollouts, is part of the address, and works from the address alone."""
    numbers = [f"row-{number}" for number in expected]
    page = opened(run)
    page.click("#more")
    control = page.locator(f"[name={name}]")
    if control.evaluate("element => element.type") == "checkbox":
        control.check()
    elif control.evaluate("element => element.tagName") == "SELECT":
        control.select_option(value)
    else:
        control.fill(value)
    expect(page).to_have_url(re.compile(f"[#&]{name}={value}(&|$)"))
    expect(page.locator("#status .note")).to_have_count(0)
    shown = page.locator(".row")
    assert shown.evaluate_all("rows => rows.map(row => row.id)") == numbers
    page.goto("about:blank")
    page.goto(run.as_uri() + f"#{name}={value}")
    expect(shown).to_have_count(len(expected))
    assert shown.evaluate_all("rows => rows.map(row => row.id)") == numbers
    assert page.locator(f"[name={name}]").input_value() == value


def test_range_of_memory_rewards_needs_one_turn_inside(run, opened):
    """Both ends of a range hold for the same turn: turns above and below it do not make up for one inside."""
    page = opened(run, "#R_M_min=-0.05&R_M_max=0.2")
    assert page.locator(".row").evaluate_all("rows => rows.map(row => row.id)") == ["row-1"]


def test_search_in_whole_rollouts(run, opened):
    """Memories and documents are searched on demand, names of fields are not; clearing shows all again."""
    page = opened(run, "#q=black")
    expect(page.locator(".empty", has_text="No rollout passes")).to_be_visible()
    page.keyboard.press("f")
    page.check("[name=deep]")
    expect(page.locator(".row")).to_have_count(3)
    page.fill("[name=q]", "completion")
    expect(page.locator(".row")).to_have_count(0)
    page.click("text=Clear all")
    expect(page.locator(".row")).to_have_count(4)


def test_keys(run, opened):
    """The keys go through rollouts and turns, search, explain themselves, switch what is shown, and go back."""
    page = opened(run)
    title, key = page.locator("#detail h1"), page.keyboard.press
    key("j")
    expect(title).to_have_text(KEEPS["question"])
    key("j")
    expect(title).to_have_text(LOSES["question"])
    key("ArrowDown")
    expect(title).to_have_text(CUT["question"])
    key("ArrowUp")
    expect(title).to_have_text(LOSES["question"])
    expect(page.locator(".row.chosen")).to_have_attribute("id", "row-1")
    key("ArrowRight")
    key("ArrowRight")
    expect(page.locator(".turn.at h2")).to_have_text("Turn 2")
    assert page.url.endswith("rollout=1&turn=2")
    key("ArrowLeft")
    expect(page.locator(".turn.at h2")).to_have_text("Turn 1")
    key("k")
    expect(title).to_have_text(KEEPS["question"])
    expect(page.locator("#detail ins").first).to_be_visible()
    key("d")
    expect(page.locator("#detail ins")).to_have_count(0)
    key("a")
    expect(page.locator("mark.advantage").first).to_be_visible()
    key("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("jk?")  # letters of a search are no keys
    expect(page.locator("#search")).to_have_value("jk?")
    expect(page.locator("#help")).to_be_hidden()
    key("Escape")
    expect(page.locator("#search")).not_to_be_focused()
    key("?")
    expect(page.locator("#help")).to_be_visible()
    key("Escape")
    expect(page.locator("#help")).to_be_hidden()
    key("Escape")
    expect(page.locator(".about")).to_be_visible()


def test_timeline(run, opened):
    """Memory, think, call, documents, tokens and figures of a turn, the plot, and the siblings of the question."""
    page = opened(run, "#rollout=0&turn=2")
    first, second, last = (page.locator(f"#turn-{number}") for number in (1, 2, 3))
    expect(second).to_be_in_viewport()
    assert first.locator(".documents h4").all_inner_texts() == ["Anna (village)", "Bob"]
    assert "Bob has\nDoc 7(Title: x) a dog." in first.locator(".documents .text").last.inner_text()
    assert first.locator(".part.memory").count() == 0
    assert "look for Bob" in second.inner_text() and second.locator(".query").inner_text() == "Bob"
    assert "100 → 20 tokens" in second.inner_text() and "0.300" in second.inner_text()
    assert last.locator("ins").all_inner_texts() == [" black Cat!"] and last.locator("del").all_inner_texts() == [
        " cat"
    ]
    assert page.locator(".plot polyline").count() == 2 and page.locator(".plot .area").count() == 3
    assert page.locator(".group .chip").all_inner_texts() == ["1", "2"]
    page.locator(".group .chip").last.click()
    expect(page.locator(".row.chosen")).to_have_attribute("id", "row-3")
    page.locator(".plot .area").last.click()
    expect(page.locator(".turn.at h2")).to_have_text("Turn 3")


def test_where_answers_are_found_and_lost(run, opened):
    """Each objective says where its golden answer was, in a sentence, in squares and in the texts."""
    page = opened(run, "#rollout=1")
    traces = page.locator(".trace p").all_inner_texts()
    assert traces == [
        "found in documents at turn 1 · in memory at turn 2 · lost at turn 3",
        "found in documents at turn 3 · in memory at turn 4 · in the answer",
    ]
    cells = page.locator(".strip").first.locator(".cell")
    assert cells.evaluate_all("cells => cells.map(cell => cell.title)") == [
        "Turn 1: in documents",
        "Turn 2: in memory",
        "Turn 3: lost",
        "Turn 4: neither in documents nor in memory",
    ]
    marks = page.locator(".turn mark.gold")
    assert marks.all_inner_texts() == ["cat", "cat", "cat", "KARL", "Carl", "Carl"]  # the third one is crossed out
    assert page.locator(".objective .mark").all_inner_texts() == ["✗", "✓"]
    assert page.locator("#turn-3 del").all_inner_texts() and "cat" in page.locator("#turn-3 del").inner_text()


def test_shading_by_advantage(run, opened, tmp_path):
    """
    Tokens have A_T, those of the memory block A_T + λ·A_M: 0.5 + 0.5 * 1.5 = 1.25 and 0.5 - 0.5 * 3 = -1. By tokens where
    there are any: `>\\n` closes the block and opens what follows, and counts as memory.
    """
    page = opened(run, "#rollout=0")
    page.click("button:text('Completion')")
    marks = page.locator("#turn-2 mark.advantage")
    assert marks.evaluate_all("marks => marks.map(mark => mark.title)") == ["A = 1.250, memory block", "A = 0.500"]
    assert marks.first.inner_text() == "<mem>Anna has a cat</mem>"
    assert page.locator("#turn-3 mark.advantage").first.get_attribute("title") == "A = −1.000, memory block"
    assert page.locator("#turn-1 mark.advantage").count() == 1
    legend = page.inner_text(".legend")
    assert "−1.25" in legend and "λ = 0.50)" in legend and "by the characters" in legend

    tokens = ["<me", "m>", "Anna", "</mem", ">\n", "<think>", "x"]
    markers = [1, 0, 0, 0, 2, 0, 0]
    exact = turn("".join(tokens), memory="Anna", tokens=tokens, mem_rewards_idx_list=markers, A_M=2.0)
    write_lines(tmp_path / "some.jsonl", [record(turns=[exact], A_T=-1.0)])
    page = opened(write_report(tmp_path / "some.jsonl").path, "#rollout=0")
    page.keyboard.press("a")
    marks = page.locator("mark.advantage")
    assert marks.evaluate_all("marks => marks.map(mark => [mark.textContent, mark.title])") == [
        ["<mem>Anna</mem>\n", "A = 1.000, memory block"],
        ["<think>x", "A = −1.000"],
    ]
    assert "exact to the token" in page.inner_text(".legend") and "assumed" in page.inner_text(".legend")


def test_excluded_rollout(opened, tmp_path):
    """A rollout that took no part in training says so."""
    write_lines(tmp_path / "some.jsonl", [record(excluded=True, reward=None), record(excluded=False, reward=1.0)])
    path = write_report(tmp_path / "some.jsonl").path
    assert "not trained" in opened(path, "#rollout=0").inner_text(".rollout-facts")
    assert "not trained" not in opened(path, "#rollout=1").inner_text(".rollout-facts")


def test_hostile_and_long_texts(opened, tmp_path):
    """Markup is shown as it stands, wherever it comes from, and a long text is cut until it is asked for."""
    hostile = [
        search_turn(HOSTILE, f"Doc 1(Title: {HOSTILE}) {HOSTILE}", HOSTILE, error=HOSTILE, tool_error=HOSTILE),
        search_turn("q", HOSTILE, LONG_TEXT, prompt=HOSTILE),
        answer_turn(HOSTILE, HOSTILE + LONG_TEXT),
    ]
    shared = {"id": HOSTILE, "dataset": HOSTILE, "prefix": HOSTILE, "error": HOSTILE, "A_T": 1.0}
    records = [record(HOSTILE, HOSTILE, [[HOSTILE]], hostile, **shared), record(HOSTILE * 40, turns=[turn(HOSTILE)])]
    write_lines(tmp_path / "rollouts.jsonl", records)
    evaluation = {"model": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}, "results": {HOSTILE: {HOSTILE: 1}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    page = opened(write_report(tmp_path).path)
    visible = HOSTILE.replace("\x00", "")
    assert visible[:40] in page.inner_text("#detail") and visible[:40] in rows(page)[0]
    page.keyboard.press("j")
    expect(page.locator("#detail h1")).to_contain_text("<!-- <img src=x onerror='window.pwned = 2'> ]]>")
    assert page.locator("#detail img, #detail script, #list img").count() == 0
    assert page.locator("#turn-1 .documents .text").evaluate("e => e.textContent") == HOSTILE.strip()
    page.locator("summary", has_text="What this turn read").click()
    assert page.locator("#turn-2 .folded .text").evaluate("e => e.textContent") == HOSTILE
    memory = page.locator("#turn-2 .part.memory .text")
    assert len(memory.inner_text()) < 10_000
    memory.locator("button", has_text="Show all 109,999 characters").click()
    assert memory.evaluate("e => e.textContent") == LONG_TEXT.strip()
    page.keyboard.press("a")
    expect(page.locator("mark.advantage").first).to_be_visible()
    page.keyboard.press("j")
    expect(page.locator(".row.chosen")).to_have_attribute("id", "row-1")


def test_rollouts_with_almost_nothing(opened, tmp_path):
    """Old, failed and empty rollouts are shown without what they lack."""
    failed = record(answer=None, turns=[], outcome="failed", error="time-out")
    empty_memory = record(turns=[turn("", "no_action"), answer_turn("cat", " ")])
    write_lines(tmp_path / "some.jsonl", [{"turns": [{}]}, failed, empty_memory])
    page = opened(write_report(tmp_path / "some.jsonl").path, "#rollout=0")
    expect(page.locator("#turn-1")).to_contain_text("The completion is empty.")
    page.keyboard.press("a")
    expect(page.locator(".legend")).to_contain_text("no advantages")
    page.keyboard.press("a")
    page.keyboard.press("j")
    expect(page.locator("#detail")).to_contain_text("time-out")
    page.keyboard.press("j")
    expect(page.locator("#turn-2 .part.memory")).to_contain_text("Empty.")


def test_figures_and_notes_of_an_evaluation(opened, tmp_path):
    """The first page has the figures with their intervals, the settings, and says what is not in it."""
    write_lines(tmp_path / "rollouts.jsonl", [record(f"question {i}") for i in range(6)])
    figures = {"num_rollouts": 1234, "exact_match": 0.5, "tokens_total_mean": 4321.5, "outcomes": {"answer": 3}}
    figures["ci95"] = {"exact_match": [0.25, 0.75]}
    evaluation = {
        "model": "some/model",
        "settings": {"max_turns": 6, "x": [1]},
        "results": {"all": figures, "2": figures},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    page = opened(write_report(tmp_path, max_rollouts=4).path)
    about = page.inner_text("#detail")
    for text in (
        "Evaluation",
        "some/model",
        "This page shows 4 of 6 rollouts, evenly",
        "2 objectives",
        "0.250 to 0.750",
    ):
        assert text in about
    main = page.locator("table").first
    assert main.locator("thead th").all_inner_texts() == ["all", "2 objectives"]
    assert main.locator("tr", has_text="num rollouts").locator("td").all_inner_texts() == ["1,234", "1,234"]
    assert main.locator("tr", has_text="tokens total").locator("td").all_inner_texts() == ["4,322", "4,322"]
    assert "outcomes.answer" not in page.inner_text("#detail")
    page.locator("summary", has_text="All figures").click()
    assert "outcomes.answer" in page.inner_text("#detail")
    page.locator("summary", has_text="settings").click()
    assert "max_turns" in page.inner_text("#detail")


def test_light_and_dark(run, opened):
    """The page follows the system, the key overrules it, and the choice outlasts the page."""
    background = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = opened(run, color_scheme="light"), opened(run, color_scheme="dark")
    colours = [page.evaluate(background) for page in (light, dark)]
    assert colours == ["rgb(247, 247, 245)", "rgb(19, 20, 23)"]
    light.keyboard.press("t")
    assert light.evaluate(background) == colours[1]
    light.reload()
    light.wait_for_selector("body[data-ready]")
    assert light.evaluate(background) == colours[1]
    light.click("#theme")
    assert light.evaluate(background) == colours[0]


def test_phone(run, opened):
    """A phone shows one pane at a time and never scrolls sideways; the way back leads to the list."""
    page = opened(run, viewport=PHONE)
    expect(page.locator("#detail")).to_be_hidden()
    page.locator("#row-1").click()
    expect(page.locator("#turn-1")).to_be_visible()
    expect(page.locator("#list")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate("document.getElementById('detail').scrollWidth") == PHONE["width"]
    page.click(".crumbs .back")
    expect(page.locator("#list")).to_be_visible()
    page.click("#title")
    expect(page.locator(".about")).to_be_visible()


def test_many_rollouts(opened, tmp_path, monkeypatch):
    """Only rows in sight exist, the last rollout is reached by its address, and a place that is not there says so."""
    monkeypatch.setattr(report, "CHUNK_BYTES", 2000)
    write_lines(tmp_path / "some.jsonl", [record(f"question {i}", step=i // 8) for i in range(3000)])
    path = write_report(tmp_path / "some.jsonl").path
    page = opened(path, "#rollout=2999")
    expect(page.locator("#detail h1")).to_have_text("question 2999")
    expect(page.locator("#row-2999")).to_be_in_viewport()
    assert page.locator(".row").count() < 40
    page.evaluate("document.getElementById('list').scrollTop = 0")
    expect(page.locator("#row-0")).to_be_in_viewport()
    assert page.locator(".row").count() < 40
    page = opened(path, "#rollout=3000")
    expect(page.locator("#detail")).to_contain_text("There is no rollout 3000")


@pytest.fixture(scope="module")
def calls(browser):
    """Call functions of `text.js` on a blank page."""
    page = browser.new_page()
    source = (report.VIEWER / "text.js").read_text(encoding="utf-8")
    yield lambda expression, *args: page.evaluate(f"(args) => {{ {source}; return {expression}; }}", list(args))
    page.close()


@pytest.mark.parametrize(
    "text, aliases, expected",
    [
        ("A cat, a CAT and a catfish", ["cat"], ["cat", "CAT"]),
        ("the New-York  City of New York", ["New York", "The New York City"], ["New-York  City", "New York"]),
        ("U.S. or us", ["U.S."], ["U.S"]),
        ("born 10,000 in 1987.", ["10000", "1987"], ["1987"]),
        ("yes, no doubt", ["yes"], None),
        ("nothing", ["...", " "], None),
        ("no, Yes", ["no", "noon"], []),
        ("İstanbul is ISTANBUL", ["istanbul"], ["ISTANBUL"]),
        ("他在北京市生活", ["北京"], ["北京"]),
        ("Café cafés", ["café"], ["Café"]),
        ("𝐀cat cat𝐀 🐈cat🐈", ["cat"], ["cat"]),
        ("a+b (x) a b", ["a+b"], ["a+b", "a b"]),
        ("The Who, who and Beatles", ["The Who", "The Beatles"], ["The Who", "Beatles"]),
    ],
)
def test_occurrences(calls, text, aliases, expected):
    """
    Whole words of any alias, whatever the case and what is between words; no article, no yes or no. Places are exact also
    after letters whose lower case is longer.
    """
    found = calls(
        "((p) => p && occurrences(args[0], p).map(([a, b]) => args[0].slice(a, b)))(answerPattern(args[1]))",
        text,
        aliases,
    )
    assert found == expected


@pytest.mark.parametrize(
    "memories, responses, answer, expected",
    [
        ([None, "cat", "cat"], ["cat", "", None], "cat", "found in documents at turn 1 · in memory at turns 2–3 · in the answer"),
        ([None, "dog", "dog"], ["cat", "", None], "dog", "found in documents at turn 1 · never in the memory · lost at turn 2"),
        ([None, "", "cat"], ["cat", "cat", None], "cat", "found in documents at turns 1–2 · in memory at turn 3 · lost at turn 2 · in the answer"),
        ([None, "cat", "x"], ["", "", None], "dog", "never in the documents · in memory at turn 2 (before any document held it) · lost at turn 3"),
        ([None, "cat", "x"], ["cat", "", None], "cat", "found in documents at turn 1 · in memory at turn 2 · in the answer"),
        ([None, None, None], ["", "", None], "dog", "never in the documents"),
    ],
)  # fmt: skip
def test_traces(calls, memories, responses, answer, expected):
    """An answer is lost at the turn that neither remembers nor gives what the last turn's memory or documents held."""
    turns = [
        {"memory": memory, "response": response, "outcome": "tool_call" if response is not None else "answer"}
        for memory, response in zip(memories, responses, strict=True)
    ]
    assert calls("traceInWords(traceAnswer(args[0], args[1], answerPattern(['cat'])))", turns, answer) == expected


@pytest.mark.parametrize(
    "before, after, expected",
    [
        ("a b c", "a x c", [["same", "a"], ["removed", " b"], ["added", " x"], ["same", " c"]]),
        ("a", "a", [["same", "a"]]),
        ("", "new", [["added", "new"]]),
        ("old", "", [["removed", "old"]]),
        ("a b", "b a", [["removed", "a"], ["same", "b"], ["added", " a"]]),
        ("cat;", "cat; dog", [["same", "cat;"], ["added", " dog"]]),
    ],
)
def test_word_diff(calls, before, after, expected):
    """What is the same and what was added are together the new text."""
    assert calls("diffWords(args[0], args[1])", before, after) == expected


def test_word_diff_of_long_texts(calls):
    """Long texts that differ everywhere are not compared word by word, and still make up the new text."""
    before, after = ("a{} ".format, "b{} ".format)
    before, after = ("".join(map(make, range(3000))) for make in (before, after))
    parts = calls("diffWords(args[0], args[1])", before, after)
    assert "".join(text for kind, text in parts if kind != "removed") == after
    assert len(parts) <= 3


@pytest.mark.parametrize(
    "response, expected",
    [
        ("Doc 1(Title: A) one\nDoc 2(Title: B (c) d) two\nlines", [["A", "one"], ["B (c) d", "two\nlines"]]),
        ("Doc 1(Title: A (b) one", [["A (b", "one"]]),
        ("Doc 1(Title: A) one\nDoc 3(Title: B) still one", [["A", "one\nDoc 3(Title: B) still one"]]),
        ("No results found for this query.", None),
        ("Error: Doc 1(Title: A) x", None),
        ("first\nDoc 1(Title: A) x", None),
        ("Doc 1(Title: never closed", None),
    ],
)
def test_documents(calls, response, expected):
    """Titles may hold parentheses, and only the next number starts another document."""
    found = calls("splitDocuments(args[0])?.map(({ title, text }) => [title, text]) ?? null", response)
    assert found == expected
