// The playground: a chat with streaming, as any client of the API could have it.

import { AnswerBox } from "./answer.js";
import { eventsOf, failure, headers, read } from "./api.js";
import { byId, element } from "./dom.js";
import { digits, milliseconds, plural } from "./units.js";

const EXAMPLE = [{ type: "function", function: { name: "get_weather", description: "The weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const ASK = "Say something. Enter sends, Shift+Enter breaks the line.";

export class Chat {
  constructor() {
    this.messages = [];
    this.boxes = [];
    this.unanswered = []; // calls whose results the user has to write
    this.running = null; // the AbortController of the answer that is streaming
    this.model = "";
    byId("tools").value = JSON.stringify(EXAMPLE, null, 1);
    byId("form").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("form").requestSubmit();
    });
    byId("clear").addEventListener("click", () => this.clear());
    byId("coloured").addEventListener("change", () => this.recolour());
    byId("playground").addEventListener("keydown", (event) => { if (event.key === "Escape") this.running?.abort(); });
    this.recolour();
  }

  submit() {
    if (this.running) { this.running.abort(); return; }
    const text = byId("text").value.trim();
    if (!text) return;
    byId("text").value = "";
    const call = this.unanswered.shift();
    if (call) this.say({ role: "tool", tool_call_id: call.id, content: text }, `Result of ${call.function.name}`);
    else this.say({ role: "user", content: text }, "You");
    this.prompt();
    if (!this.unanswered.length) this.answer();
  }

  say(message, title) {
    this.messages.push(message);
    this.put(element("article", { class: `said ${message.role}`, "aria-label": title }, message.content));
  }

  put(node) {
    byId("log").append(node);
    this.follow();
  }

  follow() {
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  prompt() {
    const [call] = this.unanswered;
    byId("text").placeholder = call ? `The result of ${call.function.name}, for the model` : ASK;
  }

  clear() {
    this.running?.abort();
    Object.assign(this, { messages: [], boxes: [], unanswered: [] });
    byId("log").replaceChildren();
    byId("figures").textContent = "";
    this.prompt();
  }

  recolour() {
    byId("log").classList.toggle("with-drafts", byId("coloured").checked);
    if (!byId("coloured").checked) this.boxes.forEach((box) => box.draw());
  }

  async answer() {
    const box = new AnswerBox(() => byId("coloured").checked), messages = this.messages;
    this.boxes.push(box);
    this.put(box.node);
    this.running = new AbortController();
    byId("send").textContent = "Stop";
    try {
      byId("figures").textContent = await this.stream(box, this.running.signal);
    } catch (error) {
      const stopped = error.name === "AbortError";
      byId("figures").textContent = stopped ? "stopped" : "";
      if (!stopped) this.put(element("article", { class: "said error", role: "alert" }, error.message));
    }
    this.running = null;
    byId("send").textContent = "Send";
    box.end();
    if (messages !== this.messages) return; // a new chat has begun
    if (box.empty) {
      box.node.remove();
      if (byId("figures").textContent !== "stopped") this.messages.pop();
      return;
    }
    if (byId("figures").textContent === "stopped") delete box.message.tool_calls; // perhaps half a call
    this.messages.push(box.message);
    this.unanswered = [...box.message.tool_calls ?? []];
    this.prompt();
  }

  // Reads an answer into `box`; returns its figures.
  async stream(box, signal) {
    const times = { sent: performance.now(), first: 0, last: 0 };
    let usage = null, synthetic = false;
    this.model ||= (await (await read("v1/models")).json()).data[0].id;
    const response = await fetch("v1/chat/completions",
      { method: "POST", headers: headers(), signal, body: JSON.stringify(this.request()) });
    if (!response.ok) throw await failure(response);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      synthetic ||= event.system_fingerprint.endsWith("_synthetic");
      if (event.choices[0]?.logprobs) {
        times.last = performance.now();
        times.first ||= times.last;
      }
      box.add(event);
      this.follow();
    }
    const told = usage ? figures(usage, times) : "";
    return synthetic ? `${told}; drafts accepted by chance: the answer means nothing` : told;
  }

  request() {
    const limit = Number(byId("max-tokens").value), thinking = byId("thinking").value, tools = byId("tool-choice").value;
    return {
      model: this.model, messages: this.messages, stream: true,
      // Log-probabilities tell the tokens of each step, and usage how many of them were drafted.
      logprobs: true, stream_options: { include_usage: true, continuous_usage_stats: true },
      temperature: Number(byId("temperature").value), speculative: byId("speculative").checked,
      ...(limit && { max_tokens: limit }),
      ...(thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
      ...(tools && { tools: JSON.parse(byId("tools").value), tool_choice: tools }),
    };
  }
}

// A verify step yields its accepted drafts and one token more; token 0 comes from the prompt.
function figures(usage, { sent, first, last }) {
  const later = usage.completion_tokens - 1;
  const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } = usage.completion_tokens_details;
  const parts = [plural(usage.completion_tokens, "token"), `first after ${milliseconds(first - sent)}`];
  if (later > 0 && last > first) parts.push(`${digits(later / ((last - first) / 1000))} tokens/s`);
  if (later > accepted && accepted + rejected > 0) parts.push(`acceptance length ${digits(later / (later - accepted))}`);
  if (accepted + rejected > 0) parts.push(`${accepted} of ${accepted + rejected} drafts accepted`);
  return parts.join(" · ");
}
