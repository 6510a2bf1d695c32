// Markdown as elements: markdown-it parses it, and what it finds is built here, so that no text ever becomes HTML.

import MarkdownIt from "./vendor/markdown-it.mjs";
import { copyButton, make } from "./elements.js";

const parser = new MarkdownIt("default", { html: false, linkify: false });

// Show a text that may still grow: blocks that stay the same keep their elements, and with them what is selected.
export function showMarkdown(element, text) {
  const blocks = split(text);
  const shown = [...element.children];
  blocks.forEach((block, place) => {
    const old = shown[place];
    if (old?.source === block.source) return;
    const built = build(block.tokens);
    built.source = block.source;
    if (old) old.replaceWith(built);
    else element.append(built);
  });
  shown.slice(blocks.length).forEach((old) => old.remove());
}

// The blocks of the highest level: each its tokens, and all that they say as one string.
function split(text) {
  const blocks = [];
  let tokens = [];
  for (const token of parser.parse(text, {})) {
    tokens.push(token);
    if (token.level || token.nesting === 1) continue;
    blocks.push({ tokens, source: JSON.stringify(tokens.map((each) => [each.type, each.attrs, each.info, each.content])) });
    tokens = [];
  }
  return blocks;
}

function build(tokens) {
  const root = make("div", "block");
  fill(root, tokens);
  return root;
}

function fill(root, tokens) {
  const open = [root];
  for (const token of tokens) {
    const inner = open.at(-1);
    if (token.hidden) continue; // the paragraphs of a tight list
    if (token.nesting === 1) {
      const element = start(token);
      inner.append(element);
      open.push(element);
    } else if (token.nesting === -1) open.pop();
    else if (token.type === "inline") fill(inner, token.children);
    else inner.append(leaf(token));
  }
}

const DIRECTED = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "th", "td", "blockquote"]);

function start(token) {
  const element = make(token.tag);
  if (DIRECTED.has(token.tag)) element.dir = "auto";
  if (token.type === "link_open") return link(element, token.attrGet("href"), token.attrGet("title"));
  if (token.type === "ordered_list_open" && token.attrGet("start") !== null) element.start = token.attrGet("start");
  const align = /text-align:(\w+)/.exec(token.attrGet("style") || "");
  if (align) element.style.textAlign = align[1];
  return element;
}

function link(element, address, title) {
  element.href = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer";
  element.title = title || address;
  return element;
}

function leaf(token) {
  switch (token.type) {
    case "text": return document.createTextNode(token.content);
    case "softbreak": return document.createTextNode("\n");
    case "hardbreak": return make("br");
    case "code_inline": return make("code", "", token.content);
    case "hr": return make("hr");
    case "fence": case "code_block": return code(token);
    case "image": return link(make("a", "", `image: ${token.content || token.attrGet("src")}`), token.attrGet("src"));
    default: return document.createTextNode(token.content);
  }
}

function code(token) {
  const language = token.info.trim().split(/\s+/)[0];
  const figure = make("figure", "code");
  const caption = make("figcaption");
  caption.append(make("span", "dim", language || "text"), copyButton(() => token.content, "Copy the code"));
  const body = make("pre");
  body.dir = "ltr";
  body.tabIndex = 0; // it scrolls
  body.setAttribute("role", "region");
  body.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  body.append(make("code", "", token.content.replace(/\n$/, "")));
  figure.append(caption, body);
  return figure;
}
