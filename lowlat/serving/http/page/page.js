// The page of the HTTP gateway: a chat with the served model, and its server's figures. Nothing comes from another host.

import { find, make, Meter, resetFigures, showFigures } from "./figures.js";
import { ask, events, setKey } from "./server.js";

const REFRESH_MS = 1000;
const STATS_TIMEOUT_MS = 5000;
const CONTINUATION_TOKENS = 256; // where there is no chat template, and no limit is given

let turns = []; // the conversation as the next request sends it: each { prompt, text }
let running = null; // the answer that is being written
let model = "";
let hasTemplate = false;

// A text of unknown language: its direction is its own.
function makeText(text) {
  const element = make("div", "text", text);
  element.dir = "auto";
  return element;
}

function makeMessage(name, label) {
  const element = make("article", name);
  element.setAttribute("aria-label", label);
  find("messages").append(element);
  return element;
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

// The path and body of the request for the last turn's answer; a setting that is left empty is the server's to choose.
function request() {
  const { prompt } = turns.at(-1);
  const body = { model, stream: true, lowlat: true };
  if (find("temperature").value) body.temperature = Number(find("temperature").value);
  if (find("max-tokens").value) body.max_tokens = Number(find("max-tokens").value);
  if (!hasTemplate) return ["v1/completions", { max_tokens: CONTINUATION_TOKENS, ...body, prompt, logprobs: 0 }];
  const said = turns.slice(0, -1).flatMap((turn) =>
    [{ role: "user", content: turn.prompt }, { role: "assistant", content: turn.text }]);
  const messages = [...said, { role: "user", content: prompt }];
  return ["v1/chat/completions", { ...body, messages, logprobs: true, top_logprobs: 0 }];
}

// One answer that is being written; `begun` says that something came.
class Answer {
  constructor(prompt) {
    makeMessage("message user", "You").append(makeText(prompt));
    this.shown = makeMessage("message", "Answer");
    this.content = makeText();
    this.shown.append(this.content);
    this.thought = null;
    this.turn = { prompt, text: "" };
    this.aborting = new AbortController();
    this.meter = new Meter();
    this.begun = false;
  }

  take(event) {
    const choice = event.choices[0];
    const tokens = tokensOf(event, choice);
    const reasoning = choice.delta?.reasoning_content;
    const said = choice.delta ? choice.delta.content : choice.text;
    if (reasoning) {
      if (!this.thought) {
        const details = make("details");
        this.thought = makeText();
        details.append(make("summary", "", "reasoning"), this.thought);
        this.shown.prepend(details);
      }
      append(this.thought, reasoning, tokens);
    }
    if (said) append(this.content, said, tokens);
    this.turn.text += said || "";
    this.begun ||= Boolean(reasoning || said);
    this.meter.take(event);
    return choice.finish_reason;
  }
}

async function answerTo(prompt) {
  const answer = new Answer(prompt);
  turns.push(answer.turn);
  setRunning(answer);
  resetFigures();
  view.follow();
  try {
    if (!model) await learn();
    const [path, body] = request();
    let reason = null;
    for await (const event of events(await ask(path, body, answer.aborting.signal))) {
      if (running !== answer) return;
      reason = answer.take(event) || reason;
      view.follow();
    }
    answer.begun = true;
    end(answer, reason === "length" && `cut after ${answer.meter.tokens} tokens: ${body.max_tokens
      ? "“at most” ends it there" : "the server's limit, or the context, ends it there"}`, "note");
  } catch (error) {
    answer.aborting.abort();
    end(answer, error.message, "error");
  }
}

// The end of an answer, once. A question that got no word of one leaves the conversation and returns to the box.
function end(answer, note, kind) {
  if (running !== answer) return;
  if (note) answer.shown.append(make("p", kind, note));
  if (!answer.begun) {
    turns = turns.filter((turn) => turn !== answer.turn);
    find("prompt").value ||= answer.turn.prompt;
  }
  find("messages").dataset.answered = String(find("messages").querySelectorAll(".user").length);
  setRunning(null);
  view.follow();
}

// Where the model's authors advise a temperature, the empty box says which.
function showAdvice(advice) {
  if (advice?.temperature === undefined) return;
  find("temperature").placeholder = String(advice.temperature);
  find("temperature").title =
    "as the model's authors advise: " + Object.entries(advice).map((pair) => pair.join(" ")).join(", ");
}

function stop() {
  running?.aborting.abort();
  if (running) end(running, running.begun ? "stopped" : "stopped before it began", "note");
}

function clear() {
  running?.aborting.abort();
  turns = [];
  find("messages").replaceChildren();
  delete find("messages").dataset.answered;
  resetFigures();
  setRunning(null);
}

function setRunning(answer) {
  const [sending, stopping] = [find("send"), find("stop")];
  const focused = [sending, stopping].includes(document.activeElement);
  running = answer;
  sending.hidden = answer !== null;
  stopping.hidden = answer === null;
  if (focused) (answer ? stopping : sending).focus();
  find("messages").ariaBusy = String(answer !== null); // an answer is read aloud when it is whole
}

// Keeps the end of the messages in view, unless somebody has scrolled up.
const view = {
  follows: true,
  top: 0,
  scrolled() {
    const { scrollTop, clientHeight, scrollHeight } = find("messages");
    const below = scrollHeight - scrollTop - clientHeight;
    if (below < 2) view.follows = true;
    else if (scrollTop < view.top) view.follows = false;
    else if (below < 60) view.follows = true; // lines may have come since the end was reached
    view.top = scrollTop;
  },
  follow() {
    requestAnimationFrame(() => { if (view.follows) find("messages").scrollTop = find("messages").scrollHeight; });
  },
};

// Ask the server what it serves, and show its figures.
async function learn() {
  const figures = await (await ask("lowlat/stats", null, AbortSignal.timeout(STATS_TIMEOUT_MS))).json();
  model = figures.server.model;
  hasTemplate = figures.server.has_chat_template;
  find("model").textContent = find("model").title = model;
  find("hint").hidden = hasTemplate;
  find("max-tokens").placeholder = hasTemplate ? "any" : String(CONTINUATION_TOKENS);
  showAdvice(figures.server.sampling_defaults);
  showFigures(figures);
  return figures.stats.state;
}

async function refresh() {
  let said = "";
  const bad = await learn().then((found) => { said = found; }).catch((error) => error);
  const state = find("state");
  if (bad) said = bad.state || "the page failed: " + bad.message;
  if (state.textContent !== said) state.textContent = said; // said once, not every second
  state.title = bad ? bad.message : "";
  state.className = bad ? "bad" : "";
  find("figures").classList.toggle("away", Boolean(bad));
  find("key-form").hidden = bad?.status !== 401;
  return !bad;
}

// One question at a time, however long the server takes.
async function keepRefreshing() {
  if (!document.hidden) await refresh();
  setTimeout(keepRefreshing, REFRESH_MS);
}

function send() {
  const prompt = find("prompt").value;
  if (!prompt.trim() || running) return;
  find("prompt").value = "";
  view.follows = true;
  answerTo(prompt);
}

function listen() {
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key").value);
    find("key").value = "";
    refresh();
  });
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  find("prompt").addEventListener("keydown", (event) => {
    const composing = event.isComposing || event.keyCode === 229; // 229: Safari's Enter that ends a composition
    if (event.key === "Enter" && !event.shiftKey && !event.altKey && !composing) {
      event.preventDefault();
      if (!running) find("ask").requestSubmit();
    }
  });
  find("stop").addEventListener("click", (event) => {
    if (event.detail < 2) stop(); // Stop stands where Send stood: the second click of a double click is not meant
  });
  find("clear").addEventListener("click", clear);
  find("messages").addEventListener("scroll", view.scrolled);
  find("show-figures").addEventListener("click", (event) => {
    event.target.ariaExpanded = String(find("figures").classList.toggle("shown"));
  });
}

async function start() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (fragment.has("key")) {
    setKey(fragment.get("key"));
    history.replaceState(null, "", location.pathname); // the key does not stay in the address
  }
  listen();
  if (await refresh() && fragment.has("key") && fragment.has("prompt")) {
    find("prompt").value = fragment.get("prompt");
    send();
  }
  setTimeout(keepRefreshing, REFRESH_MS);
}

start();
