"""The model card: what is changed in TRL's own card, and what is added to it, case by case."""

import pytest
from conftest import config
from trl.trainer.utils import generate_model_card

from mempo_trl.model_card import complete_model_card


def make_card(tmp_path, base_model="", is_adapter=False, log_history=(), dataset_name=None, **settings) -> str:
    """The card of a run: written by TRL's own function, as `create_model_card` calls it, then completed."""
    in_folder = base_model == "" or (tmp_path / base_model).is_dir()
    path = tmp_path / "README.md"
    generate_model_card(
        base_model=None if in_folder else base_model,
        model_name="agent",
        hub_model_id="founder/agent",
        dataset_name=dataset_name,
        tags=["trl", "mempo"],
        wandb_url=None,
        trackio_url=None,
        trainer_name="MemPO",
    ).save(path)
    args = config(tmp_path, **settings)
    complete_model_card(
        str(path),
        args,
        list(log_history),
        model_id="founder/agent",
        base_model=str(tmp_path / base_model) if in_folder and base_model else base_model,
        is_adapter=is_adapter,
        system_prompt="Search.",
    )
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "base_model, is_adapter, loads, text",
    [
        ("org/base", False, 'AutoModelForCausalLM.from_pretrained("founder/agent")', "[org/base](https://"),
        ("org/base", True, 'AutoPeftModelForCausalLM.from_pretrained("founder/agent")', "[org/base](https://"),
        ("tiny", False, 'AutoModelForCausalLM.from_pretrained("founder/agent")', "`tiny`, a model in a local folder."),
        ("tiny", True, 'PeftModel.from_pretrained(base_model, "founder/agent")', "`tiny`, a model in a local folder."),
        ("", False, 'AutoModelForCausalLM.from_pretrained("founder/agent")', "of a model without a name."),
        ("", True, 'from_pretrained("path/to/base-model")', "of a model without a name."),
    ],
)
def test_quick_start_and_base_model(tmp_path, base_model, is_adapter, loads, text):
    """The card says how to load the model that it belongs to, and names its base only by a name that a reader can use."""
    (tmp_path / "tiny").mkdir()
    card = make_card(tmp_path, base_model, is_adapter)
    assert loads in card and text in card
    assert "pipeline(" not in card and "time machine" not in card  # a single generation is no answer of an agent
    assert "None" not in card.split("## Training procedure")[0]
    assert str(tmp_path) not in card
    quick_start = card.split("## Quick start")[1].split("\n## ")[0]
    compile(quick_start.split("```python\n")[1].split("```")[0], "card", "exec")
    assert "mempo evaluate --model_name_or_path founder/agent" in quick_start


def test_a_folder_and_a_dataset(tmp_path):
    """TRL's sentence goes on with the data set behind the corrected base model."""
    (tmp_path / "tiny").mkdir()
    card = make_card(tmp_path, "tiny", dataset_name="org/questions")
    assert (
        "fine-tuned version of `tiny`, a model in a local folder on the "
        "[org/questions](https://huggingface.co/datasets/org/questions) dataset." in card
    )


def test_default_system_prompt_is_not_repeated(tmp_path):
    """A run with the default system prompt needs no file to be evaluated; one with its own states it."""
    assert "system_prompt" not in make_card(tmp_path, system_prompt=None)
    card = make_card(tmp_path, system_prompt="Search.")
    assert "--system_prompt system_prompt.txt" in card and "````text\nSearch.\n````" in card


def test_options_without_a_value_are_left_out(tmp_path):
    """The command gives only options that the run had set."""
    assert "max_tool_response_length" not in make_card(tmp_path).split("### Recipe")[0]
    assert "--max_tool_response_length 7\n" in make_card(tmp_path, max_tool_response_length=7, system_prompt=None)


def test_last_evaluation_of_all_data_sets(tmp_path):
    """The table is of the last evaluation only, of all data sets in it, and without what is not a measured figure."""
    history = [
        {"step": 1, "eval_reward": 0.1, "eval_old/reward": 0.9, "epoch": 0.1},
        {"step": 2, "loss": 0.5},
        {"step": 2, "eval_easy_reward": 0.75, "eval_easy_memory/p_mem": 0.125, "eval_easy_runtime": 3.0},
        {"step": 2, "eval_hard_reward": 0.25, "eval_hard_memory/p_mem": None, "epoch": 0.2},
        {"step": 2, "train_runtime": 9.0},
    ]
    evaluation = make_card(tmp_path, log_history=history).split("### Evaluation\n")[1].split("### Framework")[0]
    rows = [line for line in evaluation.splitlines() if line.startswith("| ")][2:]
    assert "At step 2" in evaluation
    assert rows == ["| easy_memory/p_mem | 0.1250 |", "| easy_reward | 0.7500 |", "| hard_reward | 0.2500 |"]


def test_no_evaluation_no_table(tmp_path):
    """A run without evaluation has no empty table."""
    assert "### Evaluation" not in make_card(tmp_path, log_history=[{"step": 1, "loss": 0.5}])


def test_sections_keep_their_order(tmp_path):
    """The additions come before TRL's versions and citations, and nothing of TRL's card is lost behind them."""
    card = make_card(tmp_path, log_history=[{"step": 1, "eval_reward": 0.5}])
    headings = [line.lstrip("# ") for line in card.splitlines() if line.startswith("#")]
    order = ["Model Card for agent", "Quick start", "Training procedure", "Recipe", "Evaluation"]
    assert headings == [*order, "Framework versions", "Citations"]
    assert "@software{vonwerra2020trl" in card
