// The open conversation on the screen: messages and replies in turn, each with what can be done to it.
import { copyButton, icon, iconButton, make } from "./dom.js";
import { MarkdownView } from "./render.js";
import { duration, isOver, note } from "./reply.js";

const NEAR_PX = 80; // so near the end counts as at the end

/** Shows a tree's chosen path in `root`. `acts`: what the buttons call, {choose, edit, regenerate, again}. */
export class Thread {
  #views = new Map(); // node key -> view
  #tree = null;
  #due = new Set(); // replies to draw in the next frame

  constructor(root, acts) {
    this.root = root;
    this.acts = acts;
  }

  show(tree) {
    if (tree !== this.#tree) this.#views.clear();
    this.#tree = tree;
    const views = tree.path().map((node) => this.#view(node));
    views.forEach((view) => view.update(tree.place(view.node)));
    const kept = new Set(views.map((view) => view.root));
    for (const child of [...this.root.children]) if (!kept.has(child)) child.remove();
    views.forEach((view, at) => {
      if (this.root.children[at] !== view.root) this.root.insertBefore(view.root, this.root.children[at] ?? null);
    });
  }

  /** A reply changed: it is drawn with the next frame, however many events come before it. */
  changed(node, drawn) {
    if (this.#views.get(node.key)?.node !== node) return;
    const waiting = this.#due.size > 0;
    this.#due.add(node);
    if (waiting) return;
    frame(() => {
      for (const each of this.#due) this.#views.get(each.key)?.update(this.#tree.place(each));
      this.#due.clear();
      drawn();
    });
  }

  /** Begins to edit the last message that is shown; false when there is none. */
  editLast() {
    const node = this.#tree?.path().findLast((each) => each.role === "user");
    if (node) this.#views.get(node.key).edit();
    return Boolean(node);
  }

  #view(node) {
    const known = this.#views.get(node.key);
    if (known) return known;
    const view = node.role === "user" ? new MessageView(node, this.acts) : new ReplyView(node, this.acts);
    this.#views.set(node.key, view);
    return view;
  }
}

/** Before the next paint; soon also where nothing is painted (a tab in the background). */
function frame(draw) {
  if (document.hidden) setTimeout(draw, 100);
  else requestAnimationFrame(draw);
}

/** Arrows to the alternatives of a node, hidden while it is the only one. */
class Arrows {
  constructor(what, choose) {
    this.before = iconButton("left", `Previous version of the ${what}`, () => choose(this.place.before));
    this.after = iconButton("right", `Next version of the ${what}`, () => choose(this.place.after));
    this.count = make("span.count");
    this.root = make("span.arrows", { role: "group", "aria-label": `Versions of the ${what}` }, this.before, this.count, this.after);
  }

  update(place) {
    this.place = place;
    this.root.hidden = place.of < 2;
    this.count.textContent = `${place.at}/${place.of}`;
    keepFocus(this.before, !place.before, this.after);
    keepFocus(this.after, !place.after, this.before);
  }
}

/** Disables a button; the focus that was on it goes to its neighbour, not to nowhere. */
function keepFocus(button, disabled, neighbour) {
  const focused = document.activeElement === button;
  button.disabled = disabled;
  if (focused && disabled) setTimeout(() => neighbour.focus());
}

class MessageView {
  constructor(node, acts) {
    this.node = node;
    this.acts = acts;
    this.words = make("p.words", { dir: "auto" });
    this.arrows = new Arrows("message", acts.choose);
    const bar = make("div.bar", {}, this.arrows.root, copyButton("Copy message", () => node.text), iconButton("edit", "Edit message", () => this.edit()));
    this.shown = make("div.bubble", {}, this.words);
    this.root = make("article.message", {}, make("h2.unseen", {}, "You"), this.shown, bar);
  }

  update(place) {
    if (this.words.textContent !== this.node.text) this.words.textContent = this.node.text;
    this.arrows.update(place);
  }

  edit() {
    if (this.root.dataset.editing !== undefined) return;
    this.root.dataset.editing = "";
    const text = make("textarea", { value: this.node.text, rows: 1, "aria-label": "Edit message", dir: "auto", maxLength: 100_000 });
    const done = () => {
      delete this.root.dataset.editing;
      form.remove();
      this.shown.hidden = false;
    };
    const send = (event) => {
      event.preventDefault();
      const words = text.value.trim();
      if (!words) return;
      done();
      if (words !== this.node.text) this.acts.edit(this.node, words);
    };
    const cancel = make("button.plain", { type: "button" }, "Cancel");
    cancel.onclick = () => {
      done();
      this.root.querySelector(".bar button[aria-label='Edit message']").focus();
    };
    const form = make("form.editor", { onsubmit: send }, text, make("div", {}, cancel, make("button.primary", { type: "submit" }, "Send")));
    text.onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel.click();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    };
    this.shown.hidden = true;
    this.shown.after(form);
    fit(text);
    text.oninput = () => fit(text);
    text.focus();
  }
}

class ReplyView {
  constructor(node, acts) {
    this.node = node;
    this.body = make("div.prose");
    this.markdown = new MarkdownView(this.body);
    this.note = make("p.note", { hidden: true });
    this.wait = make("p.waiting", { hidden: true }, make("span.dots", {}, make("i"), make("i"), make("i")), make("span.unseen", {}, "Waiting for the reply"));
    this.fallback = make("p.fallback", { hidden: true });
    this.arrows = new Arrows("reply", acts.choose);
    this.once = make("button.plain.again", { type: "button", hidden: true, onclick: () => acts.again(this.node) }, icon("again"), "Try again");
    this.bar = make(
      "div.bar",
      {},
      this.arrows.root,
      copyButton("Copy reply", () => node.reply.text),
      iconButton("again", "Regenerate reply", () => acts.regenerate(node.parent)),
    );
    const heading = make("h2.unseen", {}, "Chorus");
    this.root = make("article.reply", {}, heading, this.fallback, this.body, this.wait, this.note, this.once, this.bar);
    this.ticking = null;
  }

  update(place) {
    const { reply } = this.node;
    const over = isOver(reply);
    this.root.dataset.status = reply.end ?? reply.status;
    this.root.setAttribute("aria-busy", String(!over));
    if (reply.text || this.drawn) this.markdown.update(reply.text, !over);
    this.drawn = Boolean(reply.text);
    this.wait.hidden = over || reply.text !== "";
    this.fallback.textContent = reply.fallback;
    this.fallback.hidden = !reply.fallback;
    this.bar.querySelector("[aria-label='Copy reply']").hidden = !over || !reply.text;
    this.bar.querySelector("[aria-label='Regenerate reply']").hidden = reply.end === "failed"; // that has a button of its own
    this.arrows.update(place);
    this.#note();
  }

  /** The sentence under the reply; one with a time in it counts down. */
  #note() {
    const { reply } = this.node;
    const wait = reply.retryAt ? Math.ceil((reply.retryAt - Date.now()) / 1000) : 0;
    const when = wait > 0 ? ` You can try again in ${duration(wait)}.` : "";
    const said = note(reply) + when;
    if (this.note.textContent !== said) this.note.textContent = said;
    this.note.hidden = !said;
    this.once.hidden = reply.end !== "failed";
    this.once.disabled = wait > 0;
    clearTimeout(this.ticking);
    if (wait > 0) this.ticking = setTimeout(() => this.root.isConnected && this.#note(), 1000);
  }
}

/** A text field as high as its text, as far as the style lets it. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

/** Keeps the newest text in sight, unless the reader has scrolled away from it; `away(true | false)` says which. */
export function stickToEnd(scroller, away) {
  let sticking = true;
  let top = 0; // where it was: only who goes up leaves the end, not who is outrun by the text
  const near = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
  scroller.addEventListener(
    "scroll",
    () => {
      sticking = near() || (sticking && scroller.scrollTop >= top);
      top = scroller.scrollTop;
      away(!sticking);
    },
    { passive: true },
  );
  return (force = false) => {
    if (force) sticking = true;
    if (sticking) scroller.scrollTop = scroller.scrollHeight;
    away(!sticking && !near());
  };
}
