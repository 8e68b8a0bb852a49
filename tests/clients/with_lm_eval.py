"""lm-eval against an API: choices by log-probabilities, and answers, over completions and over chats."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from told import Server, tell

QUESTIONS = [{"q": "The capital of France is", "a": ["Paris", "Lima"], "right": 0}] * 4
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "a", "doc_to_target": "right"}
ANSWER: dict[str, Any] = {"output_type": "generate_until", "doc_to_target": "Paris"}
ANSWER |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}}


def evaluate(server: Server, kind: str, route: str, task: dict[str, Any], **more: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.json"
        data.write_text("\n".join(json.dumps(one) for one in QUESTIONS))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        told = {"task": "eyas_test", "test_split": "test", "doc_to_text": "{{q}}", **files, **task}
        (Path(folder) / "task.yaml").write_text(json.dumps(told))
        os.environ["OPENAI_API_KEY"] = server.key
        arguments = {
            "model": server.model,
            "base_url": f"{server.url}{route}",
            "tokenizer": server.folder,
            **more,
        }
        found = simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=["eyas_test"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
            apply_chat_template=kind == "local-chat-completions",
        )
    assert found and len(found["samples"]["eyas_test"]) == len(QUESTIONS)
    return found["samples"]["eyas_test"]


def choices(server: Server) -> None:
    for sample in evaluate(server, "local-completions", "/completions", CHOICE):
        assert all(score < 0 for ((score, _),) in sample["resps"]), sample["resps"]


def answers(server: Server) -> None:
    evaluate(server, "local-completions", "/completions", ANSWER)


def texts(server: Server) -> None:
    evaluate(server, "local-completions", "/completions", CHOICE, tokenized_requests=False)


def chats(server: Server) -> None:
    evaluate(server, "local-chat-completions", "/chat/completions", ANSWER)


if __name__ == "__main__":
    tell({"logprobs": choices, "completions": answers, "logprobs of texts": texts, "chat": chats})
