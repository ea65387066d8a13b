// Turns to DOM. Text from people and models only ever becomes text nodes, so nothing in it can run.
import { ending, isOver } from "./reply.js";

const make = (tag, className, text = "") => {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
};

/** Shows one turn and keeps it up to date; `onResend` is called when a failed turn should be sent again. */
export class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.root = make("article", "turn");
    this.message = make("p", "message", turn.text);
    this.reply = make("div", "reply");
    this.reply.setAttribute("aria-label", "Reply");
    this.note = make("p", "note");
    this.root.append(this.message, this.reply, this.note);
    this.shown = "";
    this.update();
  }

  update() {
    const { reply } = this.turn;
    if (reply.text !== this.shown) this.#text(reply.text);
    this.root.dataset.status = reply.status;
    this.reply.setAttribute("aria-busy", String(!isOver(reply)));
    this.note.textContent = isOver(reply) ? ending(reply) : reply.notice;
  }

  /** Appends what is new; replaces only when the text changed under us (withdrawn). */
  #text(text) {
    if (text.startsWith(this.shown)) this.reply.append(text.slice(this.shown.length));
    else this.reply.textContent = text;
    this.shown = text;
  }
}

/** Keeps the newest text in sight, unless the reader has scrolled away from it. */
export function stickToEnd(scroller) {
  const near = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
  let sticking = true;
  scroller.addEventListener("scroll", () => (sticking = near()), { passive: true });
  return (force = false) => {
    if (force) sticking = true;
    if (sticking) scroller.scrollTop = scroller.scrollHeight;
  };
}
