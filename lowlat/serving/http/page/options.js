// The fields of a request: what is left empty is the server's to choose.

import { find } from "./elements.js";

const KEPT = "lowlat options";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];

export function readOptions() {
  const given = NUMBERS.filter((name) => find(name).value !== "");
  return Object.fromEntries(given.map((name) => [name, Number(find(name).value)]));
}

// The tools of a conversation; a text that is no list is an error.
export function readTools(text) {
  if (!text.trim()) return {};
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: expected a JSON list, as OpenAI's tools are.");
  return tools.length ? { tools } : {};
}

// What the model's authors advise stands in the empty fields.
export function showAdvice(advice) {
  for (const name of NUMBERS) {
    if (advice?.[name] === undefined) continue;
    find(name).placeholder = String(advice[name]);
    find(name).title = "as the model's authors advise";
  }
}

// Keep the fields in this browser, and say on the button how many are in use.
export function keepOptions() {
  const write = () => {
    try {
      localStorage.setItem(KEPT, JSON.stringify(readOptions()));
    } catch { /* a private window: they last as long as the tab */ }
    count();
  };
  try {
    const kept = JSON.parse(localStorage.getItem(KEPT)) || {};
    NUMBERS.forEach((name) => { find(name).value = kept[name] ?? ""; });
  } catch { /* nothing that can be read is kept */ }
  find("options").addEventListener("input", write);
  count();
}

export function count() {
  const used = Object.keys(readOptions()).length + ["system", "tools"].filter((name) => find(name).value.trim()).length;
  find("show-options").textContent = used ? `Options (${used})` : "Options";
}
