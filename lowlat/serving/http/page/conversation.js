// Conversations: trees of messages, where an edited question or another answer is a branch next to the first.

const PREFIX = "lowlat conversation ";
const OPEN = "lowlat open";
const TITLE_LENGTH = 60;

// A node is { id, parent, role, content } with role "user", "assistant" (also reasoning, calls, note) or "results"
// (results of tool calls, each { id, content }). `leaf` is the last node of the branch that is shown.
export class Conversation {
  constructor(kept = {}) {
    this.id = kept.id || `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
    this.system = kept.system || "";
    this.tools = kept.tools || "";
    this.nodes = kept.nodes || [];
    this.leaf = kept.leaf ?? null;
    this.changed = kept.changed || Date.now();
  }

  get title() {
    const first = this.nodes.find((node) => node?.role === "user");
    return first ? first.content.trim().replace(/\s+/g, " ").slice(0, TITLE_LENGTH) : "New conversation";
  }

  get empty() {
    return this.nodes.every((node) => node === null);
  }

  // Add a node after `parent` and show its branch.
  add(parent, facts) {
    const node = { id: this.nodes.length, parent, ...facts };
    this.nodes.push(node);
    this.leaf = node.id;
    return node;
  }

  // Take the last node of a branch out; the branch next to it is shown, where there is one.
  remove(node) {
    const others = this.siblings(node).filter((other) => other !== node);
    this.nodes[node.id] = null;
    if (others.length) this.show(others.at(-1));
    else this.leaf = node.parent;
  }

  // The nodes of the branch that is shown, from its first.
  path(end = this.leaf) {
    const found = [];
    for (let id = end; id !== null; id = this.nodes[id].parent) found.unshift(this.nodes[id]);
    return found;
  }

  siblings(node) {
    return this.nodes.filter((other) => other?.parent === node.parent);
  }

  // Show the branch of a node, to the end of its latest messages.
  show(node) {
    let last = node;
    for (;;) {
      const next = this.nodes.filter((other) => other?.parent === last.id).at(-1);
      if (!next) break;
      last = next;
    }
    this.leaf = last.id;
  }

  // The messages of a request for an answer to a node.
  messages(node) {
    const said = this.path(node.id).flatMap(messagesOf);
    return this.system.trim() ? [{ role: "system", content: this.system }, ...said] : said;
  }
}

function messagesOf(node) {
  if (node.role === "user") return [{ role: "user", content: node.content }];
  if (node.role === "results") return node.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
  const calls = node.calls?.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return [{ role: "assistant", content: node.content, ...(calls?.length ? { tool_calls: calls } : {}) }];
}

// The conversations that this browser keeps, the latest first. Where it keeps none (storage is full or forbidden), they
// live as long as the tab.
export const store = {
  unkept: new Map(),

  list() {
    const found = new Map(this.unkept);
    for (const key of Object.keys(storage("localStorage"))) {
      const kept = key.startsWith(PREFIX) ? parse(storage("localStorage")[key]) : null;
      if (kept) found.set(kept.id, new Conversation(kept));
    }
    return [...found.values()].sort((a, b) => b.changed - a.changed);
  },

  read(id) {
    const kept = parse(storage("localStorage")[PREFIX + id]);
    return kept ? new Conversation(kept) : this.unkept.get(id);
  },

  // Whether it is kept for later.
  save(conversation) {
    if (conversation.empty) return true;
    conversation.changed = Date.now();
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch { // no room, or no storage at all
      this.unkept.set(conversation.id, conversation);
      return false;
    }
  },

  remove(id) {
    this.unkept.delete(id);
    delete storage("localStorage")[PREFIX + id];
  },

  // The conversation that this tab had open before it was loaded again.
  last() {
    return this.read(storage("sessionStorage")[OPEN]);
  },

  note(id) {
    storage("sessionStorage")[OPEN] = id;
  },

  // Call back with the id of a conversation that another tab has changed or taken out.
  watch(changed) {
    addEventListener("storage", ({ key }) => {
      if (key === null || key.startsWith(PREFIX)) changed(key?.slice(PREFIX.length));
    });
  },
};

const none = {};

// A browser's storage; where it is forbidden, an object that lasts as long as the tab.
function storage(name) {
  try {
    return window[name];
  } catch {
    return none;
  }
}

function parse(text) {
  try {
    const kept = JSON.parse(text);
    return Array.isArray(kept?.nodes) ? kept : null;
  } catch {
    return null;
  }
}
