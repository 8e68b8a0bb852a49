// Calls to the gateway that serves this page. A key typed here stays in this page's memory; a browser that
// has asked for a password sends that by itself.

const TIMEOUT_MS = 5000;
let key = "";

export function useKey(value) {
  key = value;
}

export function headers() {
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// The response of a page that reads. Throws an error with `status` unless it is a success.
export async function read(path) {
  const response = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await failure(response);
  return response;
}

export async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const error = new Error(body.error?.message ?? `HTTP ${response.status}`);
  return Object.assign(error, { status: response.status });
}

// The JSON objects of a stream of server-sent events.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
