"""Nothing foreign is executed or unpickled, and no secret is written."""

import ast
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from conftest import REPOSITORY, build, call, script_of
from trl import ModelConfig

from mempo_trl import MemPOConfig
from mempo_trl.retrieval.tool import SearchTool
from mempo_trl.scripts import recipes
from mempo_trl.scripts.arguments import load_generation_config, load_model, load_tokenizer


SOURCES = sorted(
    path for folder in ("mempo_trl", "recipes", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")
)
# Calls that run or unpickle what they are given. `torch.load` would be fine with `weights_only`; nothing needs it.
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen"),
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "torch.load",
        "joblib.load",
        "pandas.read_pickle",
        "yaml.unsafe_load",
    ),
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_is_executed_or_unpickled(path):
    """No call in the package, the recipes or the benchmarks runs text, starts a shell, unpickles, or trusts code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name, where = ast.unparse(node.func), f"{path}:{node.lineno}"
        assert name not in FORBIDDEN, f"{where}: {name}"
        if name == "yaml.load":  # by a loader that makes plain values only
            assert issubclass(recipes._RecipeLoader, yaml.SafeLoader) and ast.unparse(node.args[1]) == "_RecipeLoader"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            assert (keyword.arg, value) not in {
                ("shell", True),
                ("allow_pickle", True),
                ("weights_only", False),
                ("trust_remote_code", True),
            }, where


@pytest.fixture
def folder_with_code(model_folder, tmp_path) -> Path:
    """A model and a tokenizer that bring their own code, which leaves a trace when it is run."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in Path(model_folder).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nConfig = Model = Tok = object\n")
    for name, auto_map in {
        "config.json": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoModel": "evil.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Tok", "evil.Tok"]},
    }.items():
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "auto_map": auto_map}))
    return folder


def test_code_of_a_model_is_not_run(folder_with_code, tmp_path):
    """What the scripts load is loaded by the library's own classes; code beside it stays unread."""
    args = ModelConfig(model_name_or_path=str(folder_with_code), dtype="float32")
    load_tokenizer(args)
    load_generation_config(args)
    load_model(args, trainable=False)
    assert not (tmp_path / "ran").exists()
    # Else this tests nothing: with trust it is run.
    with pytest.raises(Exception):  # noqa: B017
        load_model(args, trainable=False, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_code_of_an_encoder_is_not_run(folder_with_code, tmp_path):
    """Nor is the code that an encoder for dense retrieval brings."""
    dense = pytest.importorskip("mempo_trl.retrieval.dense")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "evil.Model"}]
    (folder_with_code / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Exception):  # noqa: B017
        dense.Encoder(folder_with_code)
    assert not (tmp_path / "ran").exists()


SECRET = "hf_0123456789secret"


def test_no_secret_is_saved(short_folder, tmp_path, caplog, capfd, monkeypatch):
    """Neither the Hub's token nor a key in a URL is in any file of a run, in its log or in its output."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    class Broken:
        def search(self, queries, top_k):
            raise OSError(f"401 for https://user:{SECRET}@search.example/find?key={SECRET}&q={queries[0]}")

    trainer = build(
        short_folder,
        tmp_path,
        script_of([call("a"), "<mem>x</mem><answer>cat</answer>"]),
        tools=[SearchTool(Broken())],
        hub_token=SECRET,
        save_strategy="steps",
        save_steps=1,
        max_tool_error_rate=1.0,
        log_rollout_ids=True,
    )
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    assert trainer.args.hub_token == SECRET  # it is still there for the push
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "README.md"} <= {path.name for path in files}
    assert any(path.suffix == ".jsonl" for path in files)
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in caplog.text
    assert SECRET not in "".join(capfd.readouterr())


def test_saved_arguments_can_be_read(tmp_path):
    """The arguments that are saved with a model are all there but for the token."""
    args = MemPOConfig(str(tmp_path), use_cpu=True, bf16=False, hub_token=SECRET, report_to="none")
    torch.save(args, tmp_path / "training_args.bin")
    read = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert {**read.to_dict(), "hub_token": None} == {**args.to_dict(), "hub_token": None}
    assert (read.hub_token, args.hub_token) == (None, SECRET)
    assert SECRET not in repr(args) and SECRET not in json.dumps(args.to_dict(), default=str)
    assert os.path.getsize(tmp_path / "training_args.bin") > 0
