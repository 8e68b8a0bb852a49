"""A tool through the gRPC SDK: the model asks for a call, and answers with what that gave."""

import json

from eyas.client import Client, Tool

weather = Tool(
    "weather",
    "The weather in a city.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
messages = [{"role": "user", "content": "What is the weather in Oslo?"}]

with Client("127.0.0.1:8001") as client:
    answer = client.chat(messages, tools=[weather], max_tokens=256).choices[0]
    messages.append(answer.message)
    for call in answer.tool_calls:
        city = json.loads(call.arguments)["city"]
        sky = json.dumps({"city": city, "sky": "clear"})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": sky})
    print(client.chat(messages, tools=[weather], max_tokens=256).text)
