// Making and finding elements.

const COPIED_MS = 1500;

export const find = (id) => document.getElementById(id);

export function make(kind, name, text) {
  const element = document.createElement(kind);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}

export function makeButton(label, text, act) {
  const button = make("button", "small", text);
  button.type = "button";
  if (label !== text) button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

// A text of unknown language: its direction is its own.
export function makeText(text, name = "text") {
  const element = make("div", name, text);
  element.dir = "auto";
  return element;
}

// A button that copies what `source` gives, and says that it did.
export function copyButton(source, label) {
  const button = makeButton(label, "Copy", async () => {
    button.textContent = await copy(source()) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, COPIED_MS);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => copyBySelection(text));
  return copyBySelection(text); // a page over plain HTTP, from another machine, has no clipboard
}

function copyBySelection(text) {
  const area = make("textarea", "unseen", text);
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
