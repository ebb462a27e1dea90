"""A real vLLM server in a process group of its own, for tests and benchmarks."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import httpx


REPOSITORY = Path(__file__).parent.parent
NO_ENVIRONMENT = (
    "there is no environment with a vLLM server: `make vllm_environment` makes one, and `MEMPO_VLLM_ENV` may name "
    "another"
)


def find_environment() -> Path | None:
    """Folder of the environment that vLLM is installed in: what `MEMPO_VLLM_ENV` names, else what the Makefile made."""
    named = os.environ.get("MEMPO_VLLM_ENV")
    folder = Path(named) if named else REPOSITORY / ".venv-vllm"
    # The stamp is written last: a folder without it is half an installation.
    found = (folder / "bin" / "vllm").exists() and (named or (folder / ".installed").exists())
    return folder.absolute() if found else None


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# Beside the server, in its process group, something waits for the end of our pipe: a process that is killed, as by a
# time-out, leaves no server behind.
WITH_US = 'exec 3<&0; (cat <&3 > /dev/null; kill -9 0) & exec "$@" 3<&- < /dev/null'


class VllmServer:
    """
    `vllm serve` on the CPU, in float32 and with the log-probabilities of the distribution that is sampled from. It has
    generated a token when the constructor returns, and its processes are gone after `close`, which leaving a `with`
    block calls.

    Args:
        model_folder (`str`):
            The model and its tokenizer. On a CPU, heads have 32, 64, 80, 96, 112, 128 or more dimensions.
        lora (`bool`, *optional*, defaults to `False`):
            Take adapters of rank 16 at most, which can be loaded while it runs.
        port (`int`, *optional*, defaults to `0`):
            Where it listens; 0 takes a free port.
        max_model_len (`int`, *optional*, defaults to `2048`):
            Tokens of a prompt and its completion.
        served_model_name (`str`, *optional*, defaults to `"policy"`):
            Name that requests give the model.
        arguments (`list[str]`, *optional*):
            Further arguments of `vllm serve`.
        environment (`dict[str, str]`, *optional*):
            Further environment variables.
        log_file (`str` or `Path`, *optional*):
            Where its output goes; all starts are appended. Defaults to a file in a new temporary folder.
        start_seconds (`float`, *optional*, defaults to `420.0`):
            Seconds within which it has to be up. A minute on an idle machine.

    Raises:
        FileNotFoundError: If there is no environment to start it from.
        RuntimeError: If it ends or is not up in time; the message has the end of its log.
    """

    def __init__(
        self,
        model_folder: str | os.PathLike,
        lora: bool = False,
        port: int = 0,
        max_model_len: int = 2048,
        served_model_name: str = "policy",
        arguments: list[str] | None = None,
        environment: dict[str, str] | None = None,
        log_file: str | os.PathLike | None = None,
        start_seconds: float = 420.0,
    ):
        folder = find_environment()
        if folder is None:
            raise FileNotFoundError(NO_ENVIRONMENT)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = Path(log_file or Path(tempfile.mkdtemp(prefix="vllm-log-")) / "server.log")
        self.served_model_name = served_model_name
        self.start_seconds = start_seconds
        self.command = [str(folder / "bin" / "vllm"), "serve", str(model_folder)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", served_model_name]
        self.command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", str(max_model_len)]
        self.command += ["--logprobs-mode", "processed_logprobs"]
        # On a CPU, vLLM 0.31 dies of a request with a seed whose prompt is read in pieces ("CPU Generator does not use
        # offset"), which happens as soon as many prompts come at once.
        self.command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(4096, max_model_len))]
        if lora:
            self.command += ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"]
        self.command += arguments or []
        self.environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        # What belongs to this process's Python and not to the server's.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            self.environment.pop(name, None)
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self, wait: bool = True) -> None:
        """Start it, and wait until it is up."""
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", WITH_US, "sh", *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it is up; if that fails or is interrupted, nothing is left of it."""
        deadline = time.monotonic() + self.start_seconds
        try:
            while not self.is_up():
                if self.process.poll() is not None:
                    self._fail(f"ended with code {self.process.returncode}")
                if time.monotonic() > deadline:
                    self._fail(f"was not up after {self.start_seconds:g} s")
                time.sleep(0.2)
            self._generate()
        except BaseException:
            self.kill()
            raise

    def _generate(self) -> None:
        """Its first token, which is slow, and which a model with unsupported heads never gives."""
        body = {"model": self.served_model_name, "prompt": [0], "max_tokens": 1}
        try:
            response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=self.start_seconds)
        except httpx.RequestError as error:
            self._fail(f"broke off its first completion ({type(error).__name__})")
        if not response.is_success:
            self._fail(f"answered its first completion with HTTP {response.status_code}")

    def _fail(self, cause: str) -> None:
        self.kill()
        raise RuntimeError(f"`{' '.join(self.command)}` {cause}. From {self.log_file}:\n{self.log_tail()}")

    def is_up(self) -> bool:
        """Whether it takes requests."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.RequestError:
            return False

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of its output, and before them those that name an error."""
        log = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = dict.fromkeys(line.partition("] ")[2] or line for line in log[:-lines] if "Error: " in line)
        return "\n".join([*list(errors)[-lines:], *log[-lines:]])

    def kill(self) -> None:
        """Kill all of its processes at once, as a machine that fails would."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdin.close()

    def restart(self, wait: bool = True) -> None:
        """Kill it and start it again, on the same port."""
        self.kill()
        self.start(wait)

    def close(self) -> None:
        """End it: first asked to, then killed."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def __enter__(self) -> "VllmServer":
        return self

    def __exit__(self, *error) -> None:
        self.close()
