"use strict";
// The page of the HTTP gateway: a chat with the served model, and its server's figures. Nothing comes from another host.

const find = (id) => document.getElementById(id);
const KEY = "lowlat key";
const history_ = [];
let hasTemplate = false;
let model = "";
let running = null; // the AbortController of the answer that is being written

function make(kind, name, text) {
  const element = document.createElement(kind);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

async function ask(path, body, signal) {
  const headers = { authorization: "Bearer " + (sessionStorage.getItem(KEY) || "") };
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal };
  const answer = await fetch(path, options);
  if (answer.status === 401) find("key-form").hidden = false;
  if (!answer.ok) {
    const refusal = await answer.json().catch(() => null);
    throw new Error(refusal?.error?.message || "HTTP " + answer.status);
  }
  return answer;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Text in spans, one a token where the tokens spell it, tinted where the token was an accepted draft.
function append(element, text, tokens) {
  while (text && tokens.length) {
    const token = tokens[0];
    if (!token.text || !text.startsWith(token.text)) {
      if (tokens.some((other) => other.text && text.startsWith(other.text))) {
        tokens.shift(); // one that marks a part of the answer, and is no text
        continue;
      }
      break;
    }
    tokens.shift();
    const span = make("span", token.accepted ? "token drafted" : "token", token.text);
    const chance = token.logprob === undefined ? "" : `, probability ${Math.exp(token.logprob).toFixed(3)}`;
    span.title = (token.accepted ? "drafted and accepted" : "the target's own choice") + chance;
    element.append(span);
    text = text.slice(token.text.length);
  }
  if (text) element.append(make("span", tokens.length === 1 && tokens[0].accepted ? "token drafted" : "token", text));
}

function tokensOf(event, choice) {
  const accepted = event.lowlat?.accepted || [];
  const logprobs = choice.logprobs;
  const entries = logprobs?.content || (logprobs?.tokens || []).map((token, place) =>
    ({ token, logprob: logprobs.token_logprobs[place] }));
  return entries.map((entry, place) => ({ text: entry.token, logprob: entry.logprob, accepted: accepted[place] }));
}

function request(prompt) {
  const limits = { max_tokens: Number(find("max-tokens").value) };
  const temperature = find("temperature").value;
  if (temperature !== "") limits.temperature = Number(temperature); // empty: as the server has it
  const common = { model, stream: true, lowlat: true, ...limits };
  if (!hasTemplate) return ["v1/completions", { ...common, prompt, logprobs: 0 }];
  const messages = [...history_, { role: "user", content: prompt }];
  return ["v1/chat/completions", { ...common, messages, logprobs: true, top_logprobs: 0 }];
}

class Meter {
  constructor() {
    this.begun = performance.now();
    this.first = 0;
    this.tokens = 0;
    this.steps = 0;
  }
  take(event) {
    const count = event.lowlat?.token_ids?.length || 0;
    const now = performance.now();
    if (count && !this.first) {
      this.first = now;
      find("ttft").textContent = (now - this.begun).toFixed(1) + " ms";
    } else if (count) {
      find("speed").textContent = (this.tokens / (now - this.first) * 1000).toFixed(1);
    }
    this.tokens += count;
    this.steps += count ? 1 : 0;
    find("count").textContent = String(this.tokens);
    const metrics = event.lowlat?.metrics;
    if (metrics?.num_steps) find("per-step").textContent = (metrics.completion_tokens / metrics.num_steps).toFixed(2);
    else if (this.steps) find("per-step").textContent = (this.tokens / this.steps).toFixed(2);
  }
}

async function answerTo(prompt) {
  const messages = find("messages");
  messages.append(make("div", "message user", prompt));
  const shown = make("div", "message");
  const content = make("span");
  shown.append(content);
  messages.append(shown);
  const [path, body] = request(prompt);
  let text = "";
  let thought = null;
  for (const id of ["ttft", "speed", "count", "per-step"]) find(id).textContent = "–";
  running = new AbortController();
  find("send").textContent = "Stop";
  try {
    const meter = new Meter();
    for await (const event of events(await ask(path, body, running.signal))) {
      const choice = event.choices[0];
      const tokens = tokensOf(event, choice);
      const reasoning = choice.delta?.reasoning_content;
      if (reasoning) {
        if (!thought) {
          thought = make("details");
          thought.append(make("summary", "", "reasoning"));
          shown.prepend(thought);
        }
        append(thought, reasoning, tokens);
      }
      const said = choice.delta ? choice.delta.content : choice.text;
      if (said) {
        text += said;
        append(content, said, tokens);
      }
      meter.take(event);
      messages.scrollTop = messages.scrollHeight;
    }
    messages.dataset.answered = String(messages.querySelectorAll(".user").length);
  } catch (error) {
    if (error.name !== "AbortError") shown.append(make("div", "error", error.message));
  } finally {
    running = null;
    find("send").textContent = "Send";
    history_.push({ role: "user", content: prompt }, { role: "assistant", content: text });
  }
}

function bar(name, share, value) {
  const row = make("div", "bar");
  const track = make("span", "track");
  const fill = make("div", "fill");
  fill.style.width = Math.round(100 * Math.min(1, share)) + "%";
  track.append(fill);
  row.append(make("span", "name", name), track, make("span", "value", value));
  return row;
}

// Where the model's authors advise a temperature, the empty box says which; what was typed before stays.
function showAdvice(advice) {
  const box = find("temperature");
  if (box.dataset.advised || advice?.temperature === undefined) return;
  box.dataset.advised = "true";
  if (box.value === box.defaultValue) box.value = "";
  box.placeholder = String(advice.temperature);
  box.title = "as the model's authors advise: " + Object.entries(advice).map((pair) => pair.join(" ")).join(", ");
}

function showFigures({ stats }) {
  const engine = stats.engine || {};
  find("server-speed").textContent = stats.tokens_per_s.toFixed(1);
  find("waiting").textContent = `${stats.num_waiting} of ${stats.max_queue}`;
  const slots = new Map((engine.slots || []).map((slot) => [slot.slot, slot]));
  find("slots").replaceChildren(...Array.from({ length: stats.num_slots }, (_, number) => {
    const slot = slots.get(number);
    return slot
      ? bar(String(number), slot.completion_tokens / slot.max_tokens, String(slot.completion_tokens))
      : bar(String(number), 0, "free");
  }));
  const speculation = engine.eagle_speculation;
  if (!speculation) return;
  const rows = speculation.acceptance_by_position
    .map((share, place) => [share, speculation.drafted_by_position[place], place + 1])
    .filter(([, drafted]) => drafted)
    .map(([share, , position]) => bar(String(position), share, Math.round(100 * share) + " %"));
  if (rows.length) find("acceptance").replaceChildren(...rows);
}

async function refresh() {
  const state = find("state");
  try {
    const figures = await (await ask("lowlat/stats")).json();
    model = figures.server.model;
    hasTemplate = figures.server.has_chat_template;
    showAdvice(figures.server.sampling_defaults);
    find("model").textContent = model;
    state.textContent = figures.stats.state;
    state.className = "";
    find("key-form").hidden = true;
    find("hint").hidden = hasTemplate;
    find("hint").textContent = "This model has no chat template: it continues what you write.";
    showFigures(figures);
    return true;
  } catch (error) {
    state.textContent = error.message;
    state.className = "bad";
    return false;
  }
}

function send() {
  const prompt = find("prompt").value;
  if (!prompt.trim() || running) return;
  find("prompt").value = "";
  answerTo(prompt);
}

async function start() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (fragment.has("key")) {
    sessionStorage.setItem(KEY, fragment.get("key"));
    history.replaceState(null, "", location.pathname); // the key does not stay in the address
  }
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, find("key").value);
    find("key").value = "";
    refresh();
  });
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send();
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  find("clear").addEventListener("click", () => {
    if (running) running.abort();
    history_.length = 0;
    find("messages").replaceChildren();
  });
  setInterval(() => { if (!document.hidden) refresh(); }, 1000);
  if (await refresh() && fragment.has("key") && fragment.has("prompt")) {
    find("prompt").value = fragment.get("prompt");
    send();
  }
}

start();
