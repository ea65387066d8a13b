// A conversation as a tree: messages and replies in turn. Several replies under a message were regenerated, several messages
// under a reply were edited; at each fork one way is chosen, and the path of chosen ones is what is shown. Pure.
//
//   node   {key, role: "user" | "model", parent, children, choice, item, text | reply}
//
// `key` is the page's own and never changes; `item` is the server's name for it, unknown while it is being sent.
import { isOver, newReply, ofItem } from "./reply.js";

const textOf = (item) => (item.content ?? []).map((part) => part.text ?? "").join("");
const spoken = (item) => item.type === "message" && (item.role === "user" || item.role === "assistant");

/** The item that a reply's text stands in: a pure function of the reply's id. */
export const itemOf = (replyId) => "msg_" + replyId.replace(/^resp_/, "");

export class Tree {
  #made = 0;
  #byItem = new Map();

  /** `id`: the conversation's, null until the server has made it. */
  constructor(id = null) {
    this.id = id;
    this.entry = null; // the conversation as the server last named it
    this.root = { key: "root", role: "model", parent: null, children: [], choice: null, item: null, reply: null };
  }

  /** A new message under `parent` (a reply, or the root) with the reply to come; both are chosen. Returns the reply's node. */
  send(parent, text) {
    return this.regenerate(this.#add(parent, { role: "user", text }));
  }

  /** Another reply to `message`, chosen. */
  regenerate(message) {
    return this.#add(message, { role: "model", reply: newReply() });
  }

  /** The nodes from the first message to the end of the chosen way. */
  path() {
    const nodes = [];
    for (let node = this.root.choice; node; node = node.choice) nodes.push(node);
    return nodes;
  }

  leaf() {
    return this.path().at(-1) ?? this.root;
  }

  /** Which of its siblings a node is, and who stands beside it: {at, of, before, after}; `at` counts from 1. */
  place(node) {
    const all = node.parent.children;
    const at = all.indexOf(node);
    return { at: at + 1, of: all.length, before: all[at - 1] ?? null, after: all[at + 1] ?? null };
  }

  choose(node) {
    for (let here = node; here.parent; here = here.parent) here.parent.choice = here;
  }

  /** The newest reply the server knows on the way from `node` up, itself included: what a next message follows. */
  known(node) {
    for (let here = node; here.parent; here = here.parent) if (here.reply?.id) return here.reply.id;
    return null;
  }

  running() {
    return this.#all().filter((node) => node.reply && !isOver(node.reply));
  }

  byReply(replyId) {
    return this.#all().find((node) => node.reply?.id === replyId) ?? null;
  }

  /** Takes out a node that the server never had, and whatever hangs on it. */
  drop(node) {
    const { parent } = node;
    parent.children = parent.children.filter((child) => child !== node);
    if (parent.choice === node) parent.choice = parent.children.at(-1) ?? null;
  }

  /** The server's items, every branch, oldest first. Replies for which `live(node)` holds are left as the page has them. */
  merge(items, live = () => false) {
    const first = this.#byItem.size === 0;
    for (const item of items.filter(spoken)) {
      const parent = this.#parentOf(item, items);
      const node = this.#find(item, parent) ?? this.#add(parent, { role: item.role === "user" ? "user" : "model" }, false);
      node.item = item.id;
      this.#byItem.set(item.id, node);
      if (node.role === "user") node.text = textOf(item);
      else if (!node.reply || !live(node)) node.reply = this.#merged(node.reply, item);
      if (item.active && (first || !parent.choice)) parent.choice = node;
    }
    for (const node of [this.root, ...this.#all()]) node.choice ??= node.children.at(-1) ?? null;
  }

  /** Shows what the server calls active, for a page that had nothing of its own to show. */
  activate(items) {
    for (const item of items.filter((each) => each.active)) {
      const node = this.#byItem.get(item.id);
      if (node) node.parent.choice = node;
    }
  }

  #merged(reply, item) {
    const fresh = ofItem(item, textOf(item));
    if (!isOver(fresh) && reply) return reply; // an end that was seen here may not be stored yet
    return reply?.end === fresh.end ? { ...fresh, problem: reply.problem } : fresh; // items do not say what went wrong
  }

  /** Items of other roles (instructions) are not shown; what follows one hangs where it hangs. */
  #parentOf(item, items) {
    for (let id = item.parent_id; id; id = items.find((each) => each.id === id)?.parent_id) {
      if (this.#byItem.has(id)) return this.#byItem.get(id);
    }
    return this.root;
  }

  #find(item, parent) {
    if (this.#byItem.has(item.id)) return this.#byItem.get(item.id);
    const own = (node) =>
      node.role === "user"
        ? item.role === "user" && node.children.some((child) => child.reply?.id === item.response_id)
        : node.reply?.id && itemOf(node.reply.id) === item.id;
    return parent.children.find((node) => !node.item && own(node)) ?? null;
  }

  #add(parent, what, chosen = true) {
    this.#made += 1;
    const node = { key: `n${this.#made}`, parent, children: [], choice: null, item: null, ...what };
    parent.children.push(node);
    if (chosen) this.choose(node);
    return node;
  }

  #all() {
    const found = [];
    const left = [...this.root.children].reverse();
    while (left.length) {
      const node = left.pop();
      found.push(node);
      left.push(...[...node.children].reverse());
    }
    return found;
  }
}
