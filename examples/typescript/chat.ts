// A streamed chat with a tool through Eyas' gRPC API, from its proto alone.
//
//   node dist/chat.js [HOST:PORT] [QUESTION] [tools]     EYAS_API_KEY: the key, where the server has keys

import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { join } from "node:path";

const PROTO = join(process.cwd(), "../../protos/eyas.proto"); // from examples/typescript
const DEADLINE_MS = 60_000;

// What this example reads of the messages; protos/eyas.proto tells all fields and their defaults.
interface ToolCallDelta {
  index: number;
  id: string;
  name: string;
  arguments: string;
}
interface ChatResponse {
  event: "started" | "prompt_logprobs" | "delta" | "finished";
  started?: { request_id: string; model: string };
  delta?: { text: string; reasoning: string; tool_calls: ToolCallDelta[]; finish_reason: string };
  finished?: { usage: { prompt_tokens: number; completion_tokens: number } };
}
type Eyas = grpc.Client & {
  Chat(request: object, metadata: grpc.Metadata, options: grpc.CallOptions): grpc.ClientReadableStream<ChatResponse>;
  Models(
    request: object,
    metadata: grpc.Metadata,
    answer: (error: grpc.ServiceError | null, models: { models: { id: string }[] }) => void,
  ): void;
};

function connect(address: string): Eyas {
  const definition = loadSync(PROTO, { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true });
  const api = grpc.loadPackageDefinition(definition) as any;
  // A server with TLS: grpc.credentials.createSsl(), with the bytes of its authority if the system has it not.
  return new api.eyas.v1.Eyas(address, grpc.credentials.createInsecure());
}

function metadata(): grpc.Metadata {
  const told = new grpc.Metadata();
  const key = process.env.EYAS_API_KEY;
  if (key) told.set("authorization", `Bearer ${key}`);
  told.set("x-request-id", `typescript-${process.pid}`);
  return told;
}

function models(client: Eyas): Promise<string[]> {
  return new Promise((resolve, reject) =>
    client.Models({}, metadata(), (error, answer) =>
      error ? reject(error) : resolve(answer.models.map((model) => model.id)),
    ),
  );
}

async function chat(client: Eyas, question: string, tools: object[]): Promise<void> {
  const request = {
    messages: [{ role: "CHAT_ROLE_USER", content: question }],
    options: { max_tokens: 100, temperature: 0 },
    tools,
  };
  const calls: ToolCallDelta[] = [];
  // An iterator that is left early cancels the call, and with it all that the request holds on the server.
  for await (const response of client.Chat(request, metadata(), { deadline: Date.now() + DEADLINE_MS })) {
    const { started, delta, finished } = response as ChatResponse;
    if (started) console.error(`${started.request_id} is answered by ${started.model}`);
    if (delta) {
      process.stdout.write(delta.text);
      for (const part of delta.tool_calls) {
        // A call begins with its id and name; its arguments come piece by piece.
        if (part.index === calls.length) calls.push({ ...part, arguments: "" });
        calls[part.index].arguments += part.arguments;
      }
    }
    if (finished) console.log(`\n${finished.usage.completion_tokens} tokens`);
  }
  for (const call of calls) console.log(`calls ${call.name} with ${call.arguments}`);
}

const WEATHER = {
  name: "weather",
  description: "The weather in a city.",
  parameters: JSON.stringify({ type: "object", properties: { city: { type: "string" } }, required: ["city"] }),
};

async function main(): Promise<void> {
  const [address = "127.0.0.1:8001", question = "What is the capital of France?", tools = ""] = process.argv.slice(2);
  const client = connect(address);
  try {
    console.log(`models: ${(await models(client)).join(", ")}`);
    await chat(client, question, tools === "tools" ? [WEATHER] : []);
  } catch (caught) {
    const error = caught as grpc.ServiceError;
    // The status's message is a sentence; the trailing metadata name the error and the field that is wrong.
    const [code] = error.metadata?.get("eyas-code") ?? [];
    const [field] = error.metadata?.get("eyas-param") ?? [];
    console.error(`${code ?? error.code}${field ? ` (${field})` : ""}: ${error.details ?? error.message}`);
    process.exitCode = 1;
  } finally {
    client.close();
  }
}

void main();
