"""``areal-like serve``: one server in the foreground, asked over HTTP as a user would."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.e2e


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(tmp_path / "model")
    path = tmp_path / "exp.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "experiment_name": "serve",
                "trial_name": "test",
                "model": {"path": str(tmp_path / "model")},
                "train_dataset": {"path": "unused", "batch_size": 1},
                "workflow": "unused.Workflow",
                "total_train_steps": 1,
            }
        )
    )
    return path


def test_a_server_answers_until_it_is_interrupted(experiment: Path) -> None:
    command = [sys.executable, "-m", "launcher", "serve", str(experiment)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.search(r"at (http://\S+)", server.stdout.readline())
        token = re.search(r"Authorization: Bearer (\S+)", server.stdout.readline())
        assert address is not None
        assert token is not None
        with httpx.Client(base_url=address[1], timeout=10) as client:
            assert client.get("/health").status_code == 401
            headers = {"Authorization": f"Bearer {token[1]}"}
            assert client.get("/health", headers=headers).json()["status"] == "ok"
            body = {"rid": "1", "input_ids": [2, 3], "sampling": {"max_new_tokens": 4, "ignore_eos": True}}
            answer = client.post("/generate", headers=headers, json=body).json()
            assert len(answer["outputs"][0]["token_ids"]) == 4
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=20)
    assert server.returncode == 0
    assert "Traceback" not in errors
