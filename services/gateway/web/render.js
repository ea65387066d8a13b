// Markdown objects to DOM nodes, and what changed to as few of them as possible.
import { copyButton, make } from "./dom.js";
import { Markdown } from "./markdown.js";

const TAGS = { break: "br", code: "code", strong: "strong", em: "em", del: "del" };
const LEVEL_FIRST = 3; // the page itself has the first two levels of headings

/** Shows a text that may grow in `root`; what is settled keeps its nodes, and a reader's selection in them. */
export class MarkdownView {
  #markdown = new Markdown();
  #shown = [];

  constructor(root) {
    this.root = root;
  }

  update(text, open) {
    const blocks = this.#markdown.update(text, open);
    patch(this.root, this.#shown, blocks);
    this.#shown = blocks;
  }
}

/** Makes `parent` show `blocks` where it showed `shown`; each block keeps its element in `node`. */
function patch(parent, shown, blocks) {
  blocks.forEach((block, at) => {
    const old = shown[at];
    if (old === block) return;
    if (!old) parent.append((block.node = build(block)));
    else if (same(old, block)) Object.assign(block, old, { at: block.at });
    else if (grow(old, block)) block.node = old.node;
    else old.node.replaceWith((block.node = build(block)));
  });
  for (const old of shown.slice(blocks.length)) old.node.remove();
}

const same = (old, block) => old.type === block.type && old.source === block.source && old.open === block.open;

/** Changes an element that only grew; false when it has to be built anew. */
function grow(old, block) {
  if (old.type !== block.type) return false;
  if (block.type === "code" && old.lang === block.lang && block.text.startsWith(old.text)) {
    old.node.querySelector("code").append(block.text.slice(old.text.length));
  } else if (block.type === "list" && old.ordered === block.ordered && old.first === block.first) {
    patch(old.node, old.items, block.items);
  } else if (block.type === "quote" || block.type === "item") {
    patch(old.node, old.blocks, block.blocks);
  } else return false;
  return true;
}

function build(block) {
  return BUILDERS[block.type](block);
}

function within(element, blocks) {
  patch(element, [], blocks);
  return element;
}

const BUILDERS = {
  paragraph: (block) => make("p", { dir: "auto" }, ...spans(block.inline)),
  heading: (block) => make(`h${Math.min(block.level + LEVEL_FIRST - 1, 6)}`, { dir: "auto" }, ...spans(block.inline)),
  rule: () => make("hr"),
  quote: (block) => within(make("blockquote"), block.blocks),
  list: (block) => within(block.ordered ? make("ol", { start: block.first }) : make("ul"), block.items),
  item: (block) => within(make("li", { dir: "auto" }), block.blocks),
  code: codeBlock,
  table,
};

function codeBlock({ lang, text }) {
  const code = make("code", {}, text);
  const head = make("div.code-head", {}, make("span", {}, lang || "text"), copyButton("Copy code", () => code.textContent));
  return make("div.code", {}, head, make("pre", { tabIndex: 0, role: "group", "aria-label": `Code${lang ? `, ${lang}` : ""}` }, code));
}

function table({ align, head, rows }) {
  const cell = (tag) => (inline, at) => {
    const made = make(tag, tag === "th" ? { scope: "col" } : {}, ...spans(inline));
    if (align[at]) made.className = align[at];
    return made;
  };
  const body = rows.map((row) => make("tr", {}, ...row.map(cell("td"))));
  const made = make("table", {}, make("thead", {}, make("tr", {}, ...head.map(cell("th")))), make("tbody", {}, ...body));
  return make("div.table", { tabIndex: 0, role: "group", "aria-label": "Table" }, made);
}

function spans(nodes) {
  return nodes.map((node) => {
    if (typeof node === "string") return node;
    if (node.mark === "link") return make("a", { href: node.href, target: "_blank", rel: "noopener noreferrer" }, ...spans(node.kids));
    return make(TAGS[node.mark], {}, ...(node.kids ? spans(node.kids) : [node.text ?? ""]));
  });
}
