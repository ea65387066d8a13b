// The list of conversations, in groups by age, with search; a drawer where the screen is narrow.
import { make } from "./dom.js";

const DAY_S = 86_400;
const TYPED_MS = 200; // after the last key, the search is sent

export class Sidebar {
  #returnTo = null; // where the focus was before the drawer opened

  constructor({ side, list, search, older, main, shade, find, more }) {
    Object.assign(this, { side, list, search, older, main, shade });
    let typed;
    search.addEventListener("input", () => {
      clearTimeout(typed);
      typed = setTimeout(() => find(search.value.trim()), TYPED_MS);
    });
    older.addEventListener("click", more);
    shade.addEventListener("click", () => this.close());
    side.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    this.narrow = matchMedia("(max-width: 48rem)"); // as in the style
    this.narrow.addEventListener("change", () => this.#show(!this.narrow.matches));
    this.#show(!this.narrow.matches);
  }

  /** Shows `chats`' list; rebuilt only where it changed, so that the focus stays. */
  update(chats) {
    const list = chats.list.filter((entry) => entry.title || entry.head || entry.id === chats.tree.id); // not the empty ones
    const rows = grouped(list, Date.now() / 1000).flatMap(([name, entries]) => [
      make("p.age", { "aria-hidden": "true" }, name),
      make("ul", { "aria-label": name }, ...entries.map((entry) => row(entry, chats))),
    ]);
    if (!rows.length) rows.push(make("p.age", {}, chats.search ? "Nothing found." : "No chats yet."));
    const same = rows.length === this.list.children.length && rows.every((each, at) => each.isEqualNode(this.list.children[at]));
    if (!same) {
      const focused = this.list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      this.list.replaceChildren(...rows);
      if (focused) this.list.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
    }
    this.older.hidden = !chats.more;
  }

  get isOpen() {
    return document.body.dataset.side === "open";
  }

  toggle() {
    if (this.isOpen) this.close();
    else this.open();
  }

  open() {
    this.#returnTo = document.activeElement;
    this.#show(true);
    if (this.narrow.matches) this.side.querySelector("#new").focus();
  }

  close() {
    const inside = this.side.contains(document.activeElement) || document.activeElement === document.body;
    this.#show(false);
    if (inside) this.#returnTo?.focus();
  }

  /** After a choice in it the drawer goes; a list beside the text stays. */
  chosen() {
    if (this.narrow.matches) this.#show(false);
  }

  #show(open) {
    document.body.dataset.side = open ? "open" : "closed";
    this.side.inert = !open;
    this.main.inert = open && this.narrow.matches;
  }
}

function row(entry, chats) {
  const open = entry.id === chats.tree.id;
  const link = make("a", { href: `#/${entry.id}`, title: entry.title, "aria-current": open ? "page" : null }, make("span.title", {}, entry.title || "New chat"));
  if (chats.writing(entry.id)) link.append(make("span.dot.writing", { role: "img", "aria-label": "A reply is being written" }));
  else if (chats.unread.has(entry.id)) link.append(make("span.dot", { role: "img", "aria-label": "A reply is ready" }));
  return make("li", {}, link);
}

function grouped(list, now) {
  const groups = new Map();
  for (const entry of list) {
    const name = age(entry.updated_at ?? entry.created_at ?? now, now);
    groups.set(name, [...(groups.get(name) ?? []), entry]);
  }
  return [...groups];
}

/** How long ago, in a word. */
export function age(then, now) {
  const midnight = new Date(now * 1000).setHours(0, 0, 0, 0) / 1000;
  if (then >= midnight) return "Today";
  if (then >= midnight - DAY_S) return "Yesterday";
  if (then >= midnight - 7 * DAY_S) return "Last 7 days";
  return then >= midnight - 30 * DAY_S ? "Last 30 days" : "Older";
}
