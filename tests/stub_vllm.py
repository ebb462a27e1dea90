"""A server that does what a vLLM server does with adapters, on a tiny model in this process."""

import threading
from pathlib import Path

import torch
from peft import PeftModel
from stub_teacher import Reply, Request, StubServer, completion
from transformers import AutoModelForCausalLM


class StubVllm(StubServer):
    """
    Loads adapters at run time and answers completions with what `script(prompt_ids)` gives, under the adapter that is
    asked for: its log-probabilities are the adapter's.

    `forget()` is a restart: the adapters are gone. `stale` makes it answer with whatever adapter it has.
    """

    def __init__(self, model_folder: str, script, max_model_len: int = 4000):
        super().__init__(self._answer)
        self.models = Reply({"data": [{"id": "base", "max_model_len": max_model_len}]})
        self.model_folder, self.script = model_folder, script
        self.adapters: dict[str, PeftModel] = {}
        self.loaded: list[str] = []  # names in the order in which they came
        self.stale = False
        self.refuses: Reply | None = None  # the answer to the next adapter
        self._model_lock = threading.Lock()

    def forget(self) -> None:
        self.adapters.clear()

    def _answer(self, request: Request) -> Reply:
        with self._model_lock:
            if request.path == "/v1/load_lora_adapter":
                return self._load(request.body["lora_name"], request.body["lora_path"])
            if request.path == "/v1/unload_lora_adapter":
                known = self.adapters.pop(request.body["lora_name"], None) is not None
                return Reply("removed") if known else Reply("cannot be found", 404)
            name = request.body["model"]
            if name not in self.adapters:
                if not (self.stale and self.adapters):
                    return Reply({"error": {"message": f"The model `{name}` does not exist."}}, 404)
                name = next(iter(self.adapters))
            return self._complete(name, request.body["prompt"])

    def _load(self, name: str, path: str) -> Reply:
        if not name or not path:
            return Reply({"error": {"message": "Both 'lora_name' and 'lora_path' must be provided."}}, 400)
        if self.refuses is not None:
            return self.refuses
        if name in self.adapters:
            return Reply({"error": {"message": f"The lora adapter '{name}' has already been loaded."}}, 400)
        if not Path(path, "adapter_config.json").exists():
            return Reply({"error": {"message": f"No adapter found for {path}"}}, 404)
        self.adapters[name] = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.model_folder), path)
        self.loaded.append(name)
        return Reply(f"Success: LoRA adapter '{name}' added successfully.")

    @torch.no_grad()
    def _complete(self, name: str, prompt: list[int]) -> Reply:
        ids = self.script(prompt)
        logits = self.adapters[name].eval()(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()
        reply = completion(ids, logps)
        reply.body["model"] = name
        return reply
