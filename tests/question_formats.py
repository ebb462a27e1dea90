"""Rows of the question sets in use, each in the shape of its original, and what they are read as."""

SEARCH_R1_QUESTION = "who got the first nobel prize in physics?"
SEARCH_R1 = {  # nq_hotpotqa_train: FlashRAG's columns, and what the conversion adds
    "id": "train_0",
    "question": SEARCH_R1_QUESTION,
    "golden_answers": ["Wilhelm Conrad Röntgen", "Röntgen"],
    "data_source": "nq",
    "prompt": [
        {
            "content": "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
            "time you get new information. After reasoning, if you find you lack some knowledge, you can call a search "
            "engine by <search> query </search> and it will return the top searched results between <information> and "
            "</information>. You can search as many times as your want. If you find no further external knowledge "
            "needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
            f"illustrations. For example, <answer> Beijing </answer>. Question: {SEARCH_R1_QUESTION}\n",
            "role": "user",
        }
    ],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["Wilhelm Conrad Röntgen", "Röntgen"]}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train"},
}
WITHOUT_FLASHRAG = {name: SEARCH_R1[name] for name in SEARCH_R1 if name not in ("id", "question", "golden_answers")}
MEM1 = {
    "data_source": "hotpotqa",
    "prompt": [
        {
            "role": "user",
            "content": "You will answer multiple complex questions using iterative reasoning. ... the final answers "
            "separated by semicolon: <answer> answer1; answer2; ... </answer>. Answer the following questions: "
            'Who said "Question: what?"?; which is older, It\'s or Its?\n',
        }
    ],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": [["Ann O'Neil", 'Ann "O"'], ["It's"]]}},
    "extra_info": {"split": "train", "index": 7},
}
HOTPOTQA_HUB = {  # hotpotqa/hotpot_qa
    "id": "5a7a06935542990198eaf050",
    "question": "Which magazine was started first Arthur's Magazine or First for Women?",
    "answer": "Arthur's Magazine",
    "type": "comparison",
    "level": "medium",
    "supporting_facts": {"title": ["Arthur's Magazine", "First for Women", "Arthur's Magazine"], "sent_id": [0, 0, 1]},
    "context": {
        "title": ["Radio City (Indian radio station)", "Arthur's Magazine", "First for Women"],
        "sentences": [["Radio City is ..."], ["Arthur's Magazine (1844–1846) was ...", " ..."], ["First ..."]],
    },
}
HOTPOTQA_JSON = {  # hotpot_train_v1.1.json; 2Wiki's files have the same form
    "_id": "5a7a06935542990198eaf050",
    "answer": "Arthur's Magazine",
    "question": HOTPOTQA_HUB["question"],
    "supporting_facts": [["Arthur's Magazine", 0], ["First for Women", 0]],
    "context": [["Arthur's Magazine", ["Arthur's Magazine (1844–1846) was ..."]], ["First for Women", ["First ..."]]],
    "type": "comparison",
    "level": "medium",
}
MUSIQUE = {
    "id": "2hop__482757_12019",
    "paragraphs": [
        {"idx": 0, "title": "Green", "paragraph_text": "...", "is_supporting": True},
        {"idx": 1, "title": "Lodi", "paragraph_text": "...", "is_supporting": False},
        {"idx": 2, "title": "Miquette Giraudy", "paragraph_text": "...", "is_supporting": True},
    ],
    "question": "When was the institute that owned The Collegian founded?",
    "question_decomposition": [
        {"id": 1, "question": "The Collegian >> owned by", "answer": "Green", "paragraph_support_idx": 2},
        {"id": 2, "question": "When was #1 founded?", "answer": "1960", "paragraph_support_idx": 0},
    ],
    "answer": "1960",
    "answer_aliases": ["in 1960"],
    "answerable": True,
}
TRIVIAQA = {  # mandarjoshi/trivia_qa
    "question": "Which American-born Sinclair won the Nobel Prize for Literature in 1930?",
    "question_id": "tc_1",
    "question_source": "http://www.triviacountry.com/",
    "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
    "answer": {
        "aliases": ["(Harry) Sinclair Lewis", "Sinclair Lewis"],
        "normalized_aliases": ["harry sinclair lewis", "sinclair lewis"],
        "matched_wiki_entity_name": "",
        "normalized_matched_wiki_entity_name": "",
        "normalized_value": "sinclair lewis",
        "type": "WikipediaEntity",
        "value": "Sinclair Lewis",
    },
}
FORMATS = {
    "search-r1": (
        SEARCH_R1,
        {
            "id": "train_0",
            "dataset": "nq",
            "question": SEARCH_R1_QUESTION,
            "golden_answers": [["Wilhelm Conrad Röntgen", "Röntgen"]],
        },
    ),
    "search-r1 prompt": (
        WITHOUT_FLASHRAG,
        {
            "dataset": "nq",
            "question": SEARCH_R1_QUESTION,
            "golden_answers": [["Wilhelm Conrad Röntgen", "Röntgen"]],
        },
    ),
    "mem1": (
        MEM1,
        {
            "dataset": "hotpotqa",
            "question": 'Who said "Question: what?"?; which is older, It\'s or Its?',
            "golden_answers": [["Ann O'Neil", 'Ann "O"'], ["It's"]],
        },
    ),
    "memsearcher": (
        {
            "data_source": "nq",
            "question": "q?",
            "ability": "re_call",
            "reward_model": {"style": "rule", "ground_truth": ["cat", "a cat"]},
            "extra_info": {"env": "import ...", "func_schemas": "[{}]"},
        },
        {"dataset": "nq", "question": "q?", "golden_answers": [["cat", "a cat"]]},
    ),
    "flashrag": (
        {
            "id": "dev_0",
            "question": "q?",
            "golden_answers": ["yes"],
            "metadata": {"type": "comparison", "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 0]}},
        },
        {"id": "dev_0", "supporting_titles": ["A", "B"], "question": "q?", "golden_answers": [["yes"]]},
    ),
    "hotpotqa hub": (
        HOTPOTQA_HUB,
        {
            "id": "5a7a06935542990198eaf050",
            "supporting_titles": ["Arthur's Magazine", "First for Women"],
            "question": HOTPOTQA_HUB["question"],
            "golden_answers": [["Arthur's Magazine"]],
        },
    ),
    "hotpotqa json": (
        HOTPOTQA_JSON,
        {
            "id": "5a7a06935542990198eaf050",
            "supporting_titles": ["Arthur's Magazine", "First for Women"],
            "question": HOTPOTQA_HUB["question"],
            "golden_answers": [["Arthur's Magazine"]],
        },
    ),
    "musique": (  # the gold titles in the order of the hops
        MUSIQUE,
        {
            "id": "2hop__482757_12019",
            "supporting_titles": ["Miquette Giraudy", "Green"],
            "question": MUSIQUE["question"],
            "golden_answers": [["1960", "in 1960"]],
        },
    ),
    "nq-open": (
        {"question": "where was it filmed", "answer": ["Los Angeles", "L.A."]},
        {"question": "where was it filmed", "golden_answers": [["Los Angeles", "L.A."]]},
    ),
    "triviaqa": (
        TRIVIAQA,
        {
            "id": "tc_1",
            "question": TRIVIAQA["question"],
            "golden_answers": [["Sinclair Lewis", "(Harry) Sinclair Lewis", "harry sinclair lewis", "sinclair lewis"]],
        },
    ),
    "deepresearcher": (
        {
            "data_source": "tq",
            "prompt": [{"content": "You are ... Question: who is it?", "role": "user"}],
            "ability": "qa",
            "reward_model": {"ground_truth": "Ann<|answer_split|>Ann Example", "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
        },
        {"dataset": "tq", "question": "who is it?", "golden_answers": [["Ann", "Ann Example"]]},
    ),
    "asearcher": (
        {
            "question": "q?",
            "answer": ["3 May 1901"],
            "source": "hotpotqa",
            "aug_answer": ["May 3, 1901", "3 May 1901"],
            "qid": 17,
        },
        {"id": "17", "question": "q?", "golden_answers": [["3 May 1901", "May 3, 1901"]]},
    ),
    "shared": (
        {
            "id": "nq-open-1316",
            "question": "when does closure of the ductus arteriosus occur",
            "answers": ["at birth", "birth"],
            "dataset": "nq",
            "supporting_titles": ["Ductus arteriosus"],
            "supporting_ids": ["p03061"],
            "type": "single",
            "hops": 1,
        },
        {
            "id": "nq-open-1316",
            "dataset": "nq",
            "supporting_titles": ["Ductus arteriosus"],
            "question": "when does closure of the ductus arteriosus occur",
            "golden_answers": [["at birth", "birth"]],
        },
    ),
}
