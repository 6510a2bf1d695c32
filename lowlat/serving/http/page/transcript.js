// The messages of a conversation as they are seen.

import { copyButton, make, makeButton, makeText } from "./elements.js";
import { showMarkdown } from "./markdown.js";

const LABELS = { user: "You", assistant: "Answer", results: "Results" };

// One message. While an answer is written, `take` adds to it, and `end` says that it is whole.
class View {
  constructor(node) {
    this.node = node;
    this.element = make("article", "message " + node.role);
    this.element.setAttribute("aria-label", LABELS[node.role]);
    this.body = make("div");
    this.notes = make("div");
    this.tools = make("div", "tools");
    this.element.append(this.body, this.notes, this.tools);
  }

  note(kind, text) {
    this.notes.append(make("p", kind, text));
  }

  end() {}

  redraw() {}
}

class UserView extends View {
  constructor(node) {
    super(node);
    this.body.append(makeText(node.content));
  }
}

class ResultsView extends View {
  constructor(node) {
    super(node);
    for (const { name, content } of node.results) this.body.append(fold(`result of ${name}`, makeText(content)));
  }
}

class AnswerView extends View {
  constructor(node, asTokens) {
    super(node);
    this.asTokens = asTokens;
    this.content = makeText(undefined, "text tokens");
    this.marked = make("div", "marked");
    this.calls = make("div");
    this.body.append(this.content, this.marked, this.calls);
    this.thought = null;
    this.drawing = false;
    if (node.reasoning) append(this.makeThought(), node.reasoning, []);
    if (node.content) append(this.content, node.content, []);
    if (node.note) this.note(node.note.kind, node.note.text);
    this.redraw();
    this.showCalls();
  }

  makeThought() {
    if (this.thought) return this.thought;
    this.thought = makeText();
    this.folded = fold("reasoning", this.thought);
    this.begun = performance.now();
    this.body.prepend(this.folded);
    return this.thought;
  }

  // Add what one event brought; the node has it already.
  take({ reasoning, said, calls, tokens }) {
    if (reasoning) append(this.makeThought(), reasoning, tokens);
    if ((said || calls) && this.thought) this.endThought();
    if (said) append(this.content, said, tokens);
    if (calls) this.showCalls();
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.redraw();
    });
  }

  endThought() {
    if (!this.begun) return;
    const seconds = (performance.now() - this.begun) / 1000;
    this.folded.firstChild.textContent = `reasoned for ${seconds.toFixed(1)} s`;
    this.begun = 0;
  }

  redraw() {
    if (!this.asTokens()) showMarkdown(this.marked, this.node.content);
  }

  end() {
    this.redraw();
    this.showCalls();
  }

  showCalls() {
    this.calls.replaceChildren(...(this.node.calls || []).map(({ name, text }) => {
      const shown = fold(`calls ${name}`, make("pre", "", readable(text)));
      shown.open = true;
      return shown;
    }));
  }

  // Fields for what the tools gave, where nothing follows yet.
  askResults(send) {
    const form = make("form", "results-form");
    for (const call of this.node.calls) {
      const label = make("label", "wide", `Result of ${call.name}`);
      const field = make("textarea");
      field.rows = 2;
      field.dir = "auto";
      label.append(field);
      form.append(label);
    }
    form.append(make("button", "", "Send results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const fields = [...form.querySelectorAll("textarea")];
      send(this.node.calls.map(({ id, name }, place) => ({ id, name, content: fields[place].value })));
    });
    this.calls.append(form);
  }
}

function fold(summary, content) {
  const details = make("details");
  details.append(make("summary", "", summary), content);
  return details;
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // one that is still being written, or was cut
  }
}

// Text in spans, one a token where the tokens spell it, tinted where the token was an accepted draft.
function append(element, text, tokens) {
  while (text && tokens.length) {
    const token = tokens[0];
    if (!token.text || !text.startsWith(token.text)) {
      if (tokens.some((other) => other.text && text.startsWith(other.text))) {
        tokens.shift(); // one that marks a segment of the answer, and is no text
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

// The messages of the branch that is shown. Actions: `edit(node, text)`, `again(node)`, `choose(node)`, `results(node,
// results)`; none is offered while an answer is written.
export class Transcript {
  constructor(root, actions) {
    this.root = root;
    this.actions = actions;
    this.views = [];
  }

  get asTokens() {
    return this.root.classList.contains("as-tokens");
  }

  set asTokens(value) {
    this.root.classList.toggle("as-tokens", value);
    this.views.forEach((view) => view.redraw());
  }

  // Show a conversation; `running` is the view of the answer that is being written, which keeps its element.
  show(conversation, running) {
    this.views = [];
    this.root.replaceChildren();
    delete this.root.dataset.answered;
    for (const node of conversation.path()) {
      if (running?.node === node) this.place(running);
      else this.add(node);
    }
  }

  add(node) {
    const View = { user: UserView, assistant: AnswerView, results: ResultsView }[node.role];
    return this.place(new View(node, () => this.asTokens));
  }

  place(view) {
    this.views.push(view);
    this.root.append(view.element);
    return view;
  }

  // Offer what can be done with each message of the branch, or nothing where an answer is being written.
  offer(conversation, running) {
    const path = running ? [] : conversation.path();
    for (const view of this.views) {
      const tools = path.includes(view.node) ? this.toolsOf(view, conversation) : [];
      view.tools.replaceChildren(...tools);
      if (view.node.role !== "assistant") continue;
      view.calls.querySelector("form")?.remove();
      if (path.at(-1) === view.node && view.node.calls?.length) {
        view.askResults((results) => this.actions.results(view.node, results));
      }
    }
  }

  toolsOf(view, conversation) {
    const { node } = view;
    const tools = [];
    if (node.role !== "results") tools.push(copyButton(() => node.content, "Copy the message"));
    if (node.role === "user") tools.push(makeButton("Edit the message", "Edit", () => this.edit(view, conversation)));
    if (node.role === "assistant") tools.push(makeButton("Another answer", "Again", () => this.actions.again(node)));
    const siblings = conversation.siblings(node);
    if (siblings.length > 1) tools.push(this.branches(node, siblings));
    return tools;
  }

  branches(node, siblings) {
    const place = siblings.indexOf(node);
    const group = make("span", "branches");
    const step = (label, sign, to) => {
      const button = makeButton(label, sign, () => this.actions.choose(siblings[to]));
      button.disabled = !siblings[to];
      return button;
    };
    group.append(
      step("The version before", "‹", place - 1),
      make("span", "dim", `${place + 1} of ${siblings.length}`),
      step("The next version", "›", place + 1),
    );
    return group;
  }

  edit(view, conversation) {
    const form = make("form", "edit");
    const field = make("textarea");
    field.value = view.node.content;
    field.rows = 3;
    field.dir = "auto";
    field.setAttribute("aria-label", "Edited message");
    const leave = () => {
      form.replaceWith(view.body);
      this.offer(conversation, null);
    };
    form.append(field, make("button", "", "Send"), makeButton("Cancel", "Cancel", leave));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.actions.edit(view.node, field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (isSend(event)) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    view.body.replaceWith(form);
    view.tools.replaceChildren();
    field.focus();
  }
}

// Whether a key sends what is written: Enter, but for a new line or the end of a composition.
export function isSend(event) {
  const composing = event.isComposing || event.keyCode === 229; // 229: Safari's Enter that ends a composition
  return event.key === "Enter" && !event.shiftKey && !event.altKey && !composing;
}
