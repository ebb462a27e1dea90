"""The policy on vLLM servers: adapters get there, stale ones are errors, and what was sampled is what is trained."""

import json

import pytest
import torch
from conftest import GivenMemoryRewards, RecordedMemPOTrainer, call, config, dataset, played, row_of, search
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from stub_teacher import Reply, closed_port
from stub_vllm import StubVllm
from tenacity import wait_none
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from mempo_trl import MemPOTrainer, endpoints
from mempo_trl.generation import GenerationError
from mempo_trl.policy_servers import check_adapter, write_adapter


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch):
    """Attempts follow one another at once."""
    monkeypatch.setattr(endpoints, "BACK_OFF", wait_none())


def two_turns(tokenizer):
    """A script: a search first; then, after a tool response, one of two answers in turn."""
    count = 0

    def script(prompt: list[int]) -> list[int]:
        nonlocal count
        text = call("a")
        if "has a cat" in tokenizer.decode(prompt):
            count += 1
            text = f"<mem>m</mem><answer>{'cat' if count % 2 else 'dog'}</answer>"
        return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

    return script


def build(folder, tmp_path, *urls, trainer_class=RecordedMemPOTrainer, model=None, peft_config=None, **kwargs):
    kwargs = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_timeout": 30.0,
        "learning_rate": 0.05,
        "beta": 0.0,
        **({"vllm_server_base_url": urls[0]} if len(urls) == 1 else {"vllm_server_urls": list(urls)}),
        **kwargs,
    }
    return trainer_class(
        model=model or folder,
        args=config(tmp_path, **kwargs),
        train_dataset=dataset(),
        tools=[search],
        peft_config=LoraConfig(**LORA) if peft_config is None and model is None else peft_config,
        callbacks=[GivenMemoryRewards()],
    )


def completions_of(server):
    return [request.body for request in server.requests if request.path == "/v1/completions"]


def test_every_generation_samples_from_the_adapter_of_the_moment(short_folder, short_tokenizer, tmp_path):
    """
    Each step's requests name a version of their own, whose log-probabilities are those of the policy: every importance
    ratio is 1. What is trained is what was sampled. Servers and folder keep the last version only.
    """
    with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
        trainer = build(short_folder, tmp_path, server.url, max_steps=3)
        trainer.train()
    assert len(server.loaded) == len(set(server.loaded)) == 3 and list(server.adapters) == server.loaded[-1:]
    # Two rollouts of two turns per step.
    assert [body["model"] for body in completions_of(server)] == [name for name in server.loaded for _ in range(4)]
    assert [path.name for path in (tmp_path / "served_adapter").iterdir()] == server.loaded[-1:]
    assert len(trainer.inputs_seen) == 3
    for inputs in trainer.inputs_seen:
        ratios = inputs["importance_sampling_ratio"]
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-3)
    first = played(trainer)[0]
    trainer.inputs_seen = trainer.inputs_seen[:1]  # the next steps' rollouts have the same text
    inputs, row = row_of(trainer, first.turns)
    expected = first.turns[0].logps + [0.0] * len(first.turns[0].response_ids) + first.turns[1].logps
    sampled = inputs["sampling_per_token_logps"][row].tolist()
    assert sampled == pytest.approx(expected + [0.0] * (len(sampled) - len(expected)), abs=1e-6)
    entry = trainer.state.log_history[0]
    assert entry["sampling/sampling_logp_difference/mean"] < 1e-4 and entry["time/sync"] > 0
    # The adapter has moved, so the versions really differ.
    assert any(
        name.endswith("lora_B.default.weight") and g.abs().sum() > 0 for name, g in trainer.gradients[0].items()
    )


def test_a_stale_adapter_is_an_error(short_folder, short_tokenizer, tmp_path):
    """A server that goes on with its first version, whatever it is given and asked for, is caught at its answer."""
    with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
        trainer = build(short_folder, tmp_path, server.url, max_steps=2)
        server.stale = True
        answer = server.answer

        def stale(request):
            if request.path != "/v1/completions" and server.loaded and request.body["lora_name"]:
                return Reply("Success")
            return answer(request)

        server.answer = stale
        with pytest.raises(GenerationError, match="answered with the model 'mempo-.*instead of the adapter 'mempo-"):
            trainer.train()
    assert trainer.state.global_step == 1


def test_a_restarted_server_gets_its_adapter_again(short_folder, short_tokenizer, tmp_path):
    """A server that forgets everything in the middle of a rollout is given the version again, and the run goes on."""
    script = two_turns(short_tokenizer)
    restarts = 0

    def restarting(prompt):
        nonlocal restarts
        ids = script(prompt)
        if len(completions_of(server)) in (3, 9):
            restarts += 1
            server.forget()
        return ids

    with StubVllm(short_folder, restarting) as server:
        trainer = build(short_folder, tmp_path, server.url, max_steps=3)
        trainer.train()
    assert restarts == 2 and trainer.state.global_step == 3
    assert len(set(server.loaded)) == 3 and len(server.loaded) == 5
    for inputs in trainer.inputs_seen:
        ratios = inputs["importance_sampling_ratio"]
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-3)


def test_several_servers(short_folder, short_tokenizer, tmp_path):
    """The rollouts are shared out between the servers, each stays on one, and both have every version."""
    script = two_turns(short_tokenizer)
    with StubVllm(short_folder, script) as one, StubVllm(short_folder, script) as other:
        trainer = build(
            short_folder, tmp_path, one.url, other.url, max_steps=2, num_generations=4, per_device_train_batch_size=4
        )
        trainer.train()
    assert one.loaded == other.loaded and len(one.loaded) == 2
    for server in (one, other):
        # Two of four rollouts per step, two turns each.
        assert [body["model"] for body in completions_of(server)] == [name for name in one.loaded for _ in range(4)]


def test_seeds_belong_to_the_step(short_folder, short_tokenizer, tmp_path):
    """
    All seeds of a run differ, those of evaluations too, and a run that is resumed after a step has those of the run that
    went on.
    """

    def seeds(**kwargs):
        with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
            trainer = build(short_folder, tmp_path, server.url, max_steps=2, save_strategy="steps", save_steps=1)
            trainer.add_callback(EvaluateAfterSteps(trainer))
            trainer.train(**kwargs)
        return [body["seed"] for body in completions_of(server)]

    straight = seeds()
    assert len(set(straight)) == 16  # per step two rollouts of two turns, and an evaluation of as many
    resumed = seeds(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert sorted(resumed) == sorted(straight[8:])


class EvaluateAfterSteps(TrainerCallback):
    """Evaluates after each step, before the checkpoint is saved."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.evaluate(dataset(1))


def test_sampling_settings_reach_the_server(short_folder, short_tokenizer, tmp_path):
    """Temperature and the like, and `generation_kwargs`, are those of the configuration."""
    with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
        build(
            short_folder,
            tmp_path,
            server.url,
            temperature=0.7,
            top_p=0.9,
            generation_kwargs={"frequency_penalty": 0.5},
            max_completion_length=77,
        ).train()
    body = completions_of(server)[0]
    names = ("temperature", "top_p", "top_k", "frequency_penalty", "max_tokens")
    assert [body[name] for name in names] == [0.7, 0.9, -1, 0.5, 77]


def test_prompts_are_bounded_by_the_server(short_folder, short_tokenizer, tmp_path):
    """A server that takes fewer tokens than the model bounds the prompts; one that takes too few is an error."""
    with StubVllm(short_folder, two_turns(short_tokenizer), max_model_len=500) as server:
        trainer = build(short_folder, tmp_path, server.url, max_completion_length=100)
        assert trainer._max_prompt_length == 400
        with pytest.raises(ValueError, match="`max_completion_length` is 600.*500 tokens"):
            build(short_folder, tmp_path, server.url, max_completion_length=600)


def test_evaluation_samples_from_the_weights_as_they_are(short_folder, short_tokenizer, tmp_path):
    """Weights that change without a step, as when the best checkpoint is loaded, reach the server all the same."""
    with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
        trainer = build(short_folder, tmp_path, server.url, per_device_eval_batch_size=2)
        trainer.evaluate(dataset(1))
        trainer.evaluate(dataset(1))
        assert len(server.loaded) == 1
        with torch.no_grad():
            next(p for name, p in trainer.model.named_parameters() if "lora_B" in name).add_(0.1)
        trainer.evaluate(dataset(1))
    assert len(server.loaded) == 2


def test_an_adapter_in_training_goes_on(short_folder, short_tokenizer, tmp_path):
    """A model that has an adapter already, as for a run that goes on from a cold start with LoRA."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(short_folder), LoraConfig(**LORA))
    with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
        trainer = build(short_folder, tmp_path, server.url, model=model, beta=0.1)
        trainer.train()
        served = server.adapters[server.loaded[0]]
    assert isinstance(trainer.model, PeftModel) and "ref" in trainer.model.peft_config
    assert len(server.loaded) == 1 and list(served.peft_config) == ["default"]


# What can't be served


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "`use_dora` = True"),
        ({"bias": "all"}, "`bias` = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save`"),
        ({"rank_pattern": {"q_proj": 8}}, "`rank_pattern`"),
        ({"alpha_pattern": {"q_proj": 8}}, "`alpha_pattern`"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', which changes the base weights"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
    ],
)
def test_adapters_that_vllm_does_not_know(settings, says):
    """They are refused by name before anything is loaded, those that a server would silently ignore among them."""
    with pytest.raises(ValueError, match=says):
        check_adapter(LoraConfig(**{**LORA, **settings}))


def test_other_adapters():
    """An adapter that is not LoRA is refused; LoRA's harmless options are not."""
    with pytest.raises(ValueError, match="PROMPT_TUNING; vLLM servers take LoRA"):
        check_adapter(PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    check_adapter(LoraConfig(r=8, use_rslora=True, lora_dropout=0.1, target_modules="all-linear"))
    check_adapter(LoraConfig(r=8, init_lora_weights="eva", exclude_modules=["lm_head"]))


def test_a_refused_adapter(short_folder, short_tokenizer, tmp_path):
    """A server's refusal is an error at once, with what it said, the folder and the flags to look at."""
    with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
        trainer = build(short_folder, tmp_path, server.url)
        server.refuses = Reply({"error": {"message": "LoRA rank 4 is greater than max_lora_rank 2."}}, 500)
        with pytest.raises(
            GenerationError, match="greater than max_lora_rank 2.*served_adapter/mempo-.*--max-lora-rank"
        ):
            trainer.train()
    assert sum(request.body["lora_name"] != "" for request in server.requests) == 1


def test_a_server_without_run_time_adapters(short_folder, tmp_path):
    """It is found out when the trainer is built, with the command that helps."""
    with StubVllm(short_folder, None) as server:
        server.answer = lambda request: Reply({"detail": "Not Found"}, 404)
        with pytest.raises(GenerationError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve"):
            build(short_folder, tmp_path, server.url)


def test_a_failed_construction_leaves_the_arguments(short_folder, tmp_path, monkeypatch):
    """An error of the parent does not leave `use_vllm` switched off in the user's configuration."""

    def fail(self, *args, **kwargs):
        raise ArithmeticError("no model today")

    args = config(tmp_path, use_vllm=True, vllm_mode="server")
    monkeypatch.setattr(GRPOTrainer, "__init__", fail)
    with pytest.raises(ArithmeticError):
        MemPOTrainer(
            model=short_folder, args=args, train_dataset=dataset(), tools=[search], peft_config=LoraConfig(**LORA)
        )
    assert args.use_vllm is True


def test_no_server(short_folder, tmp_path):
    """A server that does not come up is waited for, and then named."""
    with closed_port() as url, pytest.raises(GenerationError, match=f"{url}/v1 gave no answer within"):
        build(short_folder, tmp_path, url, vllm_server_timeout=0.2)


def test_wrong_settings(short_folder, tmp_path):
    """Servers without server mode, servers given twice or not at all, and several servers for a full model."""
    with pytest.raises(ValueError, match="`vllm_server_urls` is .*`vllm_mode` is 'colocate'"):
        config(tmp_path, use_vllm=True, vllm_server_urls=["http://a"])
    with pytest.raises(ValueError, match="`vllm_server_base_url` is 'http://b'; give the servers in one"):
        config(
            tmp_path, use_vllm=True, vllm_mode="server", vllm_server_urls=["http://a"], vllm_server_base_url="http://b"
        )
    with pytest.raises(ValueError, match=r"`vllm_server_urls` is \[\]"):
        config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_urls=[])
    with pytest.raises(ValueError, match="several servers take an adapter only"):
        MemPOTrainer(
            model=short_folder,
            args=config(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_urls=["http://a", "http://b"]),
            train_dataset=dataset(),
            tools=[search],
        )


# A full model, whose weights go by TRL's client


class FakeVllmGeneration:
    """Stands for TRL's client, which needs vLLM and a GPU: counts its transfers."""

    def __init__(self, *, mode, server_base_url, **kwargs):
        assert mode == "server"
        self.syncs = 0
        self.vllm_client = self

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self):
        self.syncs += 1


def test_a_full_model(short_folder, short_tokenizer, tmp_path, monkeypatch):
    """Its weights are transferred once per step by TRL, and its turns are requests of their own for the base model."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeVllmGeneration)
    with StubVllm(short_folder, two_turns(short_tokenizer)) as server:
        server.adapters["base"] = AutoModelForCausalLM.from_pretrained(short_folder)
        trainer = RecordedMemPOTrainer(
            model=short_folder,
            args=config(
                tmp_path,
                use_vllm=True,
                vllm_mode="server",
                vllm_server_base_url=server.url,
                max_steps=2,
                gradient_accumulation_steps=2,
                steps_per_generation=1,
            ),
            train_dataset=dataset(),
            tools=[search],
            callbacks=[GivenMemoryRewards()],
        )
        trainer.train()
    # Two generation batches per step, of two rollouts with two turns.
    assert trainer.vllm_generation.syncs == 2
    assert [body["model"] for body in completions_of(server)] == ["base"] * 16
    assert len({body["seed"] for body in completions_of(server)}) == 16


# The folder


def test_the_name_of_an_adapter_is_its_content(tmp_path):
    """Equal weights and configuration give one folder, others another; nothing half written is left."""
    settings = LoraConfig(**LORA)
    first = write_adapter(tmp_path, settings, {"a": torch.ones(2)})
    assert write_adapter(tmp_path, settings, {"a": torch.ones(2)}) == first
    others = {
        write_adapter(tmp_path, settings, {"a": torch.zeros(2)}),
        write_adapter(tmp_path, LoraConfig(**{**LORA, "lora_alpha": 16}), {"a": torch.ones(2)}),
    }
    assert len({first, *others}) == 3 == len(list(tmp_path.iterdir()))
    assert json.loads((first / "adapter_config.json").read_text())["r"] == 4
