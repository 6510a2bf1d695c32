// The page of the HTTP gateway: a chat with the served model, and its server's figures. Nothing comes from another host.

import { Conversation, store } from "./conversation.js";
import { find, make, makeButton } from "./elements.js";
import { Meter, resetFigures, showFigures } from "./figures.js";
import { count, keepOptions, readOptions, readTools, showAdvice } from "./options.js";
import { ask, events, setKey, shareKey } from "./server.js";
import { isSend, Transcript } from "./transcript.js";

const REFRESH_MS = 1000;
const STATS_TIMEOUT_MS = 5000;
const CONTINUATION_TOKENS = 256; // where there is no chat template, and no limit is given

let conversation = store.last() || new Conversation(); // a reloaded tab goes on where it was
let running = null; // the answer that is being written
let model = "";
let hasTemplate = false;

const transcript = new Transcript(find("messages"), {
  edit: (node, text) => follow(node, () => conversation.add(node.parent, { role: "user", content: text })),
  again: (node) => follow(node, () => conversation.nodes[node.parent]),
  results: (node, results) => follow(null, () => conversation.add(node.id, { role: "results", results })),
  choose: (node) => {
    conversation.show(node);
    keep();
    showConversation();
  },
});

// Show the branch to a node that is asked about, and answer it; `before` is what to return to where no answer begins.
function follow(before, target) {
  const asked = target();
  conversation.leaf = asked.id;
  showConversation();
  answerTo(asked, before);
}

function tokensOf(event, choice) {
  const accepted = event.lowlat?.accepted || [];
  const logprobs = choice.logprobs;
  const entries = logprobs?.content || (logprobs?.tokens || []).map((token, place) =>
    ({ token, logprob: logprobs.token_logprobs[place] }));
  return entries.map((entry, place) => ({ text: entry.token, logprob: entry.logprob, accepted: accepted[place] }));
}

// The path and body of the request for the answer to a node.
function request(asked) {
  const body = { model, stream: true, lowlat: true, ...readOptions() };
  if (!hasTemplate) {
    return ["v1/completions", { max_tokens: CONTINUATION_TOKENS, ...body, prompt: asked.content, logprobs: 0 }];
  }
  const messages = conversation.messages(asked);
  const tools = readTools(conversation.tools);
  return ["v1/chat/completions", { ...body, ...tools, messages, logprobs: true, top_logprobs: 0 }];
}

// One answer that is being written; `begun` says that something came.
class Answer {
  constructor(asked, before) {
    this.asked = asked;
    this.before = before;
    this.conversation = conversation;
    this.node = conversation.add(asked.id, { role: "assistant", content: "" });
    this.view = transcript.add(this.node);
    this.aborting = new AbortController();
    this.meter = new Meter();
    this.begun = false;
  }

  take(event) {
    const choice = event.choices[0];
    if (!choice) return null;
    const { node } = this;
    const reasoning = choice.delta?.reasoning_content;
    const said = choice.delta ? choice.delta.content : choice.text;
    const calls = choice.delta?.tool_calls;
    for (const { index, id, function: part } of calls || []) {
      node.calls ||= [];
      node.calls[index] ||= { id, name: "", text: "" };
      node.calls[index].name += part?.name || "";
      node.calls[index].text += part?.arguments || "";
    }
    if (reasoning) node.reasoning = (node.reasoning || "") + reasoning;
    node.content += said || "";
    this.begun ||= Boolean(reasoning || said || calls);
    this.view.take({ reasoning, said, calls, tokens: tokensOf(event, choice) });
    this.meter.take(event);
    return choice.finish_reason;
  }
}

async function answerTo(asked, before = null) {
  const answer = new Answer(asked, before);
  setRunning(answer);
  resetFigures();
  keep();
  view.follow();
  try {
    if (!model) await learn();
    const [path, body] = request(asked);
    let reason = null;
    for await (const event of events(await ask(path, body, answer.aborting.signal))) {
      if (running !== answer) return;
      reason = answer.take(event) || reason;
      view.follow();
    }
    answer.begun = true;
    end(answer, reason === "length" && `cut after ${answer.meter.tokens} tokens: ${body.max_tokens
      ? "“at most” in the options allows more"
      : "the context is full, or the server allows no more; a new conversation has all of the context"}`, "note");
  } catch (error) {
    answer.aborting.abort();
    end(answer, error.message, "error");
  }
}

// The end of an answer, once. A question that got no word of one leaves the conversation and returns to the box.
function end(answer, text, kind) {
  if (running !== answer) return;
  if (text) answer.view.note(kind, text);
  if (text && answer.begun) answer.node.note = { kind, text };
  answer.view.end();
  if (!answer.begun) takeBack(answer);
  find("messages").dataset.answered = String(find("messages").querySelectorAll(".user").length);
  setRunning(null);
  keep(answer.conversation);
  view.follow();
}

function takeBack({ conversation: owner, node, asked, before, view: shown }) {
  owner.remove(node);
  if (before) {
    if (asked.id !== before.parent) owner.remove(asked); // an edit
    owner.show(before);
    if (owner !== conversation) return;
    transcript.show(conversation);
    find("messages").append(shown.element);
  } else if (asked.role === "user") {
    owner.remove(asked);
    find("prompt").value ||= asked.content;
  }
}

function stop() {
  running?.aborting.abort();
  if (running) end(running, running.begun ? "stopped" : "stopped before it began", "note");
}

function setRunning(answer) {
  const [sending, stopping] = [find("send"), find("stop")];
  const focused = [sending, stopping].includes(document.activeElement);
  running = answer;
  sending.hidden = answer !== null;
  stopping.hidden = answer === null;
  if (focused) (answer ? stopping : sending).focus();
  find("messages").ariaBusy = String(answer !== null); // an answer is read aloud when it is whole
  transcript.offer(conversation, running);
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

// Show the branch of the conversation, its options, and the list of all.
function showConversation() {
  transcript.show(conversation, running?.view);
  transcript.offer(conversation, running);
  find("system").value = conversation.system;
  find("tools").value = conversation.tools;
  count();
  listKept();
  view.follows = true;
  view.follow();
}

function open(other) {
  conversation = other;
  store.note(conversation.id);
  showConversation();
  closePanel("conversations");
}

function keep(changed = conversation) {
  const kept = store.save(changed);
  store.note(conversation.id);
  find("conversations").querySelector("p").textContent = kept
    ? "Kept in this browser alone." : "This browser keeps no more: the latest are lost with the tab.";
  listKept();
}

function listKept() {
  document.title = conversation.empty ? "lowlat" : `${conversation.title} – lowlat`;
  find("kept").replaceChildren(...store.list().map((kept) => {
    const item = make("li");
    const choose = makeButton(kept.title, kept.title, () => open(kept.id === running?.conversation.id
      ? running.conversation : store.read(kept.id) || kept));
    choose.dir = "auto";
    choose.title = kept.title;
    if (kept.id === conversation.id) choose.setAttribute("aria-current", "true");
    item.append(choose, makeButton(`Delete: ${kept.title}`, "×", () => remove(kept.id)));
    return item;
  }));
}

function remove(id) {
  if (running?.conversation.id === id) stop();
  store.remove(id);
  if (conversation.id === id) open(new Conversation());
  else listKept();
}

// Another tab has changed a conversation, or taken it out.
function changedElsewhere(id) {
  if (id !== conversation.id || running?.conversation.id === id) return listKept();
  const kept = store.read(id);
  if (kept) open(kept);
  else if (!conversation.empty) open(new Conversation());
}

// Ask the server what it serves, and show its figures.
async function learn() {
  const figures = await (await ask("lowlat/stats", null, AbortSignal.timeout(STATS_TIMEOUT_MS))).json();
  if (!model) showTokens(asTokensByChoice() ?? !figures.server.has_chat_template);
  model = figures.server.model;
  hasTemplate = figures.server.has_chat_template;
  document.body.classList.toggle("continues", !hasTemplate);
  find("model").textContent = find("model").title = model;
  find("hint").hidden = hasTemplate;
  find("max_tokens").placeholder = hasTemplate ? "any" : String(CONTINUATION_TOKENS);
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
  const asked = conversation.add(conversation.leaf, { role: "user", content: prompt });
  transcript.add(asked);
  answerTo(asked);
}

// Tokens, tinted by who proposed them, in place of formatted text: as the reader last chose, in this browser.
const TOKENS_KEPT = "lowlat tokens";

function asTokensByChoice() {
  try {
    return JSON.parse(localStorage.getItem(TOKENS_KEPT));
  } catch {
    return null;
  }
}

function showTokens(value) {
  find("as-tokens").checked = value;
  transcript.asTokens = value;
}

function togglePanel(name) {
  find("show-" + name).ariaExpanded = String(find(name).classList.toggle("shown"));
}

function closePanel(name) {
  if (find(name).classList.contains("shown")) togglePanel(name);
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
    if (!isSend(event)) return;
    event.preventDefault();
    if (!running) find("ask").requestSubmit();
  });
  find("stop").addEventListener("click", (event) => {
    if (event.detail < 2) stop(); // Stop stands where Send stood: the second click of a double click is not meant
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !event.target.closest?.(".edit")) stop();
  });
  find("new").addEventListener("click", () => {
    open(new Conversation());
    find("prompt").focus();
  });
  find("as-tokens").addEventListener("change", ({ target }) => {
    transcript.asTokens = target.checked;
    try {
      localStorage.setItem(TOKENS_KEPT, String(target.checked));
    } catch { /* a private window */ }
  });
  for (const name of ["system", "tools"]) {
    find(name).addEventListener("input", ({ target }) => {
      conversation[name] = target.value;
      if (!running) store.save(conversation);
    });
  }
  find("show-options").addEventListener("click", () => {
    find("options").hidden = !find("options").hidden;
    find("show-options").ariaExpanded = String(!find("options").hidden);
  });
  find("messages").addEventListener("scroll", view.scrolled);
  for (const name of ["figures", "conversations"]) find("show-" + name).addEventListener("click", () => togglePanel(name));
  addEventListener("pagehide", () => { if (running?.begun) store.save(running.conversation); });
  store.watch(changedElsewhere);
}

async function start() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  if (fragment.has("key")) {
    setKey(fragment.get("key"));
    history.replaceState(null, "", location.pathname); // the key does not stay in the address
  }
  listen();
  keepOptions();
  showConversation();
  shareKey(refresh);
  if (await refresh() && fragment.has("key") && fragment.has("prompt")) {
    find("prompt").value = fragment.get("prompt");
    send();
  }
  setTimeout(keepRefreshing, REFRESH_MS);
}

start();
