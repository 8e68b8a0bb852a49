"""Eyas through its gRPC SDK: a whole answer, then a streamed one and what drafting did for it."""

from eyas.client import Client

with Client("127.0.0.1:8001") as client:
    answer = client.chat([{"role": "user", "content": "What is the capital of France?"}], max_tokens=64)
    print(answer.text)

    with client.chat_stream(
        [{"role": "user", "content": "List three fruits."}], max_tokens=64, temperature=0.8, seed=7
    ) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    usage = stream.usage
    print(f"\n{usage.completion_tokens} tokens, {usage.accepted_prediction_tokens} of them drafted")
